"""The commands of `python -m vcluster`."""
