"""What an operator sees of a cache and may do to it while it runs."""
