"""Adapters for engines that number token slots instead of blocks."""
