"""The command `fastdeploy-cache storage`."""
