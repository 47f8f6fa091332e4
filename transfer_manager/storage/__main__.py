"""`python -P -m fastdeploy_cache.transfer_manager.storage`: one rank's storage process, started by the engine."""

from fastdeploy_cache.transfer_manager.storage.worker import main

if __name__ == "__main__":
    raise SystemExit(main())
