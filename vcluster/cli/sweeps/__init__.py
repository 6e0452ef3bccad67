"""`plan --tokens`: the words of a sweep over hardware and devices, and what is told of it."""
