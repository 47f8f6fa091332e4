"""WHAT is cached, WHERE and WHOSE: the lock, the tree, the pools and who owns which block."""
