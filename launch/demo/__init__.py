"""The main job: real conversations, answered faster because of the cache, and token for token the same."""
