"""vLLM's block manager interface of the V1 engine, and a KV connector."""
