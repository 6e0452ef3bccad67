"""`plan`: what a search is asked for in words, and `plan --tokens`, a sweep of searches over hardware and devices."""
