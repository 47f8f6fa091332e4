"""What other sizes of the tiers would have hit."""
