"""Programs read from text."""
