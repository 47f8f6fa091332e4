"""SGLang's own radix cache interface."""
