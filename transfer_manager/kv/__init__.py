"""What a block looks like in bytes, and whose memory it lies in."""
