"""Programs that a person starts: command line, demo, server, reference engine."""
