"""The reference model under the calling conventions of several engines."""
