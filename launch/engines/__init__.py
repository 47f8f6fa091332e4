"""Real engines with this cache in them: vLLM on a CPU, for correctness and for a table of figures."""
