"""Tests of `fastdeploy_cache.events`."""
