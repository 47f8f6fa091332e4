"""A request's life between match and release."""
