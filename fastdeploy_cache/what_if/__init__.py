"""A process that serves a sample of the references to caches of other sizes, and says what they would have hit."""
