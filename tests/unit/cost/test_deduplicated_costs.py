"""Prices of all_to_alls in which a token goes once to a node, and there once to a device."""

from __future__ import annotations

import pytest

from parallelism import Costs, Hardware, HostLink, Link
from parallelism.algorithms import Deduplicated

NEAR, FAR = 2.0**34, 2.0**30      # bytes a second, without latencies
TOKENS = Deduplicated(4, 32)


def cluster(near: int, far: int, slow: float = FAR) -> Hardware:
    links = (Link("near", near, 0.0, NEAR),) + ((Link("far", far, 0.0, slow),) if far > 1 else ())
    return Hardware("made up", {"float32": 2.0**40}, 2.0**34, 2.0**36, links, HostLink(0.0, 2.0**33))


def seconds(hardware: Hardware, nbytes: float, size: int, algorithm: str | None = str(TOKENS)) -> float:
    return Costs(hardware).collective("all_to_all", nbytes, range(size), algorithm=algorithm).seconds


@pytest.mark.parametrize(("near", "far"), [(8, 2), (4, 4), (2, 8)])
def test_a_token_crosses_to_a_node_once(near, far):
    nbytes, size = 2.0**30, near * far
    across = nbytes * TOKENS.share(far) * (far - 1) / far / FAR
    inside = nbytes * TOKENS.share(size) * (near - 1) / near / NEAR
    assert across > inside
    assert seconds(cluster(near, far), nbytes, size) == pytest.approx(across, rel=1e-12)
    # Over links between nodes that are as fast as all of a node, the rest of the way counts: both go on at once.
    fast = cluster(near, far, FAR * 2.0**20)
    assert seconds(fast, nbytes, size) == pytest.approx(inside, rel=1e-12)


def test_a_token_goes_to_a_device_of_its_node_once():
    assert seconds(cluster(8, 1), 2.0**30, 8) == pytest.approx(2.0**30 * TOKENS.share(8) * 7 / 8 / NEAR, rel=1e-12)


def test_one_device_of_each_node_gets_what_its_node_gets():
    costs = Costs(cluster(4, 4))
    group = (0, 4, 8, 12)
    found = costs.collective("all_to_all", 2.0**30, group, algorithm=str(TOKENS))
    assert found.seconds == pytest.approx(2.0**30 * TOKENS.share(4) * 3 / 4 / FAR, rel=1e-12)
    assert (found.algorithm, found.nbytes, found.size) == (str(TOKENS), 2.0**30, 4)


def test_the_bytes_on_the_links_are_those_that_are_sent():
    costs, group, nbytes = Costs(cluster(4, 2)), range(8), 2.0**30
    loads = costs.channel_bytes(costs.collective("all_to_all", nbytes, group, algorithm=str(TOKENS)), group)
    by_level = [sum(load for (level, _, _), load in loads.items() if level == each) for each in (0, 1)]
    # Eight devices send and get: a half leaves the node, three quarters of what is for it the device.
    assert by_level[1] == pytest.approx(2 * 8 * nbytes * TOKENS.share(2) / 2, rel=1e-12)
    assert by_level[0] == pytest.approx(2 * 8 * nbytes * TOKENS.share(8) * 3 / 4, rel=1e-12)


def test_only_an_all_to_all_is_priced_so():
    with pytest.raises(ValueError, match="no algorithm 'deduplicated"):
        Costs(cluster(4, 2)).collective("all_gather", 8.0, range(8), algorithm=str(TOKENS))
