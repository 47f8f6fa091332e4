"""The reference engine's one exception."""

from __future__ import annotations

__all__ = ["ModelLoadError"]


class ModelLoadError(Exception):
    """The model cannot be loaded here: one line with what failed, the value seen and the remedy."""
