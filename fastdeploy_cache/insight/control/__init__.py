"""What an operator does to a running cache, and the socket at which he asks for it."""
