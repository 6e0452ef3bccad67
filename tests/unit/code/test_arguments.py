"""`PerDevice` takes values in the order of ranks."""

import pytest

from vcluster import PerDevice


def test_values_come_in_the_order_of_ranks():
    assert PerDevice("ab").values == ["a", "b"]
    assert PerDevice({0: "a", 1: "b"}.values()).values == ["a", "b"]


@pytest.mark.parametrize(("values", "name"), [({0: "a", 1: "b"}, "dict"), ({"a", "b"}, "set"), (3, "int")])
def test_what_has_no_order_of_ranks_is_refused(values, name):
    with pytest.raises(TypeError, match=f"a list with one value for each device, in the order of ranks; got {name}"):
        PerDevice(values)
