"""What this project has of CUDA, run on a real GPU: `python -m fastdeploy_cache.launch.gpu` and its sections."""
