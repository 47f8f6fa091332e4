"""What is counted and how it leaves the process. Knows nothing of KV and imports none of ours."""
