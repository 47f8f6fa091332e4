"""The HTTP server of one instance, the router before several, and the control socket."""
