"""The tables of kinds and of algorithms: one record each, complete, and consistent with itself."""

import pytest

from parallelism.algorithms import ALGORITHMS, COLLECTIVES, KINDS, bus_factor, check_kind, phases
from parallelism.collectives.registration import check

EVERY = list(dict.fromkeys(ALGORITHMS.records.values()))


@pytest.mark.sampled(24)
@pytest.mark.parametrize("record", EVERY, ids=lambda record: f"{record.name}-{'-'.join(record.kinds)}")
def test_closed_form_steps_and_phases_agree_and_the_steps_give_what_the_kind_says(record):
    check(record, sizes=(*range(2, 10), 16))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_kind_is_checked_as_one_that_is_registered(name):
    check_kind(KINDS.records[name])
    assert (name, "direct") in ALGORITHMS.records


def test_the_table_in_the_documentation_names_every_algorithm_that_is_priced():
    table = phases.__doc__.partition("all_reduce")[2].partition("A device sends one")[0]
    named = {word.strip(",") for word in table.split()}
    assert {record.name for record in EVERY} | set(COLLECTIVES) <= named | {"all_reduce"}


def test_bus_factors_are_those_of_nccl_tests_and_none_is_defined_for_a_barrier():
    size = 4
    most = {"all_reduce": 1.5, "broadcast": 1.0, "reduce": 1.0, "permute": 1.0, "barrier": None}
    assert {name: bus_factor(name, size) for name in COLLECTIVES} == dict.fromkeys(COLLECTIVES, 0.75) | most
