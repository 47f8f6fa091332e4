"""What is shown of a cache: prefixes, requests, ranks, and the page."""
