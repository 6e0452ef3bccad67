"""A device that took the place of a dead one serves tests as the first ones did."""

pytest_plugins = ["pytester"]

TESTS = """
import os
import pytest

def dies(device):
    if device.rank == 0:
        os._exit(3)
    device.barrier()

@pytest.mark.mesh(tp=2)
def test_that_expects_a_death(virtual_cluster):
    with pytest.raises(RuntimeError, match="exit code 3"):
        virtual_cluster.run(dies)

@pytest.mark.spmd(tp=2)
def test_of_the_same_devices(device):
    got = {"rank": device.rank, "same": 1}
    device.barrier()
    assert got == {"rank": 7, "same": 1}
"""


def test_asserts_tell_their_values_on_a_device_that_was_replaced(pytester):
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E         Differing items:", "E         {'rank': 0} != {'rank': 7}"])
