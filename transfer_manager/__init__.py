"""Moves the bytes of KV blocks between tiers: one process per tensor-parallel rank, and the door to them."""
