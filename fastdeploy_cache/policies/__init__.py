"""Decisions: state in, choice out. Nothing here moves a block."""
