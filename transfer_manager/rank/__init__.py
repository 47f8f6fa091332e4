"""The rank's transfer process and the engine's half of it."""
