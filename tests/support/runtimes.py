"""Where a test of a cluster runs: on processes and on threads, through shared memory and through queues."""

import pytest

RUNTIMES = [(backend, transport) for backend in ("process", "thread") for transport in ("shared_memory", "queue")]
MAIN = [RUNTIMES[0], RUNTIMES[-1]]
"""The usual one, and what shares least with it."""
KINDS = [pytest.param(one, id="-".join(one), marks=[pytest.mark.slow] * (one not in MAIN)) for one in RUNTIMES]
"""The main ones by day, and all of them if that may take its time: pairs of a backend and a transport."""

mainly = pytest.mark.parametrize(
    ("backend", "transport"), [pytest.param(*kind.values[0], id=kind.id, marks=kind.marks) for kind in KINDS])
