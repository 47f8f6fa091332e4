"""What is wrong with a cache, as far as its requests and its metrics show."""
