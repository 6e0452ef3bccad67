"""Rows of tokens that experts look up or sort: in a program they are dealt to the experts."""
