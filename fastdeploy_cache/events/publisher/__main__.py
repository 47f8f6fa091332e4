"""`python -P -m fastdeploy_cache.events.publisher`: the process that publishes events, started by the engine."""

from fastdeploy_cache.transfer_manager.process.begin import begin

if __name__ == "__main__":
    raise SystemExit(begin("fastdeploy_cache.events.publisher.server"))
