"""A small engine that serves a real model through the cache: the example to read, and the demo to run."""
