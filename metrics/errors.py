"""Errors of the metrics layer; the whole tree is drawn in `fastdeploy_cache.errors`."""


class MetricsError(Exception):
    """Base of every error that this package raises."""


class PortInUseError(MetricsError):
    """The metrics endpoint cannot listen where it should."""
