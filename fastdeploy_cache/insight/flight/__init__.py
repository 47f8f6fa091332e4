"""What is recorded of every request as it happens."""
