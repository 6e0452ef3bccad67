"""The operators of the table, by family."""
