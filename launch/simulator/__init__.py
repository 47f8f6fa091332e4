"""Replay request traces through the real manager, without any bytes."""
