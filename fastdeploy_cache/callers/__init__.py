"""Blocks for callers that keep their own requests."""
