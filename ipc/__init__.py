"""How processes talk: shared memory for state, queues for events. Knows nothing of KV, imports none of ours."""
