"""Programs that run in a peer's interpreter and serve rounds; they need NumPy, the peer, and nothing of vcluster."""
