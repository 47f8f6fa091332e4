"""The tier below the CPU: what is read from a store, what is written to it, and whether it works."""
