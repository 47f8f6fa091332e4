"""The process that publishes events: `python -P -m fastdeploy_cache.events.publisher`, started by an engine."""
