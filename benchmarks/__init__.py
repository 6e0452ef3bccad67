"""What vcluster costs, and what its peers cost beside it: ``python -m benchmarks`` from the root of the repository.

Every system does the same work on the same sizes in interleaved rounds, each round checks its own answer, and what
comes out is a table and, with ``--json``, a file.  Nothing here is imported by the package, and nothing is installed.
"""
