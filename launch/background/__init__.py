"""Servers in the background: one, or a group of prefill and decode instances with a router before them."""
