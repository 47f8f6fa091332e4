"""Measurements of the cache's own cost, always beside a floor taken in the same run."""
