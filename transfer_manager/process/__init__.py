"""Both halves of a supervised child process."""
