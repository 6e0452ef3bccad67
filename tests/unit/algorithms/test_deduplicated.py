"""All_to_alls of tokens that go once to a unit: the mean share of rows, against every choice of experts, and names."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest

from parallelism.algorithms import Deduplicated, runs_directly


def counted(tokens: Deduplicated, units: int) -> Fraction:
    """The mean number of units that have experts of a token, over every choice, by the rows of a token."""
    inside, own = tokens.experts // tokens.groups, tokens.experts // units
    met = count = 0
    for groups in combinations(range(tokens.groups), tokens.groups_chosen):
        open_to_it = [expert for expert in range(tokens.experts) if expert // inside in groups]
        for chosen in combinations(open_to_it, tokens.chosen):
            met += len({expert // own for expert in chosen})
            count += 1
    return Fraction(met, count * tokens.chosen)


@pytest.mark.parametrize("tokens", [
    Deduplicated(1, 6), Deduplicated(2, 6), Deduplicated(6, 6), Deduplicated(3, 8), Deduplicated(3, 12, 3, 2),
    Deduplicated(2, 12, 6, 2), Deduplicated(4, 12, 6, 3), Deduplicated(2, 12, 2, 1)])
def test_the_share_is_the_mean_over_every_choice_of_experts(tokens):
    nested = [each for each in range(1, tokens.experts + 1) if tokens.experts % each == 0 == max(each, tokens.groups) % min(
        each, tokens.groups)]
    assert len(nested) > 2
    for units in nested:
        assert tokens.share(units) == pytest.approx(float(counted(tokens, units)), rel=1e-12), units


def test_one_unit_gets_a_token_once_and_a_unit_for_each_expert_gets_every_row():
    tokens = Deduplicated(8, 256, 8, 4)
    assert tokens.share(1) == 1 / 8 and tokens.share(256) == 1
    # DeepSeek-V3: a token goes to at most the 4 nodes of its groups (arXiv:2412.19437, section 3.2.2).
    assert 3 / 8 < tokens.share(8) < 4 / 8 < Deduplicated(8, 256).share(8)


def test_groups_that_cross_units_count_as_none():
    assert Deduplicated(3, 12, 3, 2).share(4) == Deduplicated(3, 12).share(4)


def test_a_name_says_which_experts_a_token_may_have():
    for tokens in (Deduplicated(2, 8), Deduplicated(8, 256, 8, 4)):
        assert Deduplicated.of(str(tokens)) == tokens
        assert runs_directly("all_to_all", str(tokens)) and not runs_directly("all_gather", str(tokens))
    assert runs_directly("all_gather", None) and runs_directly("all_to_all", "direct")
    assert not runs_directly("all_to_all", "ring")


@pytest.mark.parametrize("name", [
    None, "", "ring", "deduplicated", "deduplicated(0 of 8)", "deduplicated(9 of 8)", "deduplicated(2 of 8) ",
    "deduplicated(2 of 8, in 3 of 2 groups)", "deduplicated(2 of 8, in 1 of 3 groups)",
    "deduplicated(5 of 8, in 1 of 2 groups)",
    "deduplicated(2 of 8, in 0 of 2 groups)", "deduplicated(2 of 0)"])
def test_other_names_are_none_of_these(name):
    assert Deduplicated.of(name) is None
