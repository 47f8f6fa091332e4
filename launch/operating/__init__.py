"""Looking at a running cache and changing it, from the command line."""
