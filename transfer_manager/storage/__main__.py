"""`python -P -m fastdeploy_cache.transfer_manager.storage`: one rank's storage process, started by the engine."""

from fastdeploy_cache.transfer_manager.process.begin import begin

if __name__ == "__main__":
    raise SystemExit(begin("fastdeploy_cache.transfer_manager.storage.worker"))
