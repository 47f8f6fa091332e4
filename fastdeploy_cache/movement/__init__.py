"""Bytes on their way: copies between the tiers and within them, and the box that tasks go out by."""
