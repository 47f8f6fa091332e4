"""Prefill and decode apart: what is offered to other instances, sent to them and received from them."""
