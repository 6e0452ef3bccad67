"""NumPy functions recorded as programs, and the parts of NumPy that this supports."""
