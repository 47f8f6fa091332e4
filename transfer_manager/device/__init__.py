"""Where a rank's KV arrays live and how blocks are copied from and to them."""
