"""What users set: the settings, and where they come from."""
