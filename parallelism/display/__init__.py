"""Numbers with units, and small pictures, for terminals and notebooks."""
