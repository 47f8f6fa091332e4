"""mini-sglang's own cache interface."""
