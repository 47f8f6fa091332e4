"""`python -P -m fastdeploy_cache.transfer_manager`: one rank's process, started by the engine."""

from fastdeploy_cache.transfer_manager.rank.worker import main

if __name__ == "__main__":
    raise SystemExit(main())
