"""For engines that number token slots instead of blocks."""
