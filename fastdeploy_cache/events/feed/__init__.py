"""The engine's side of a publisher: what is told to it, and how that never waits."""
