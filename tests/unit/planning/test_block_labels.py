"""What every further block of a stage does is said by the labels of events: against stages laid out with n blocks."""

import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from parallelism import models
from parallelism.planning.trained import TrainedModel
from parallelism.planning.two_block_steps import Pattern, TwoBlockSteps, _labels, _of_two_blocks
from parallelism.symbolic import stages
from parallelism.symbolic.events import LEFT, SIZE, Event, Unpriceable, repeated
from parallelism.symbolic.orders import MIDDLE
from parallelism.symbolic.pieces import EndPieces, Updates, inside_of, numbered
from parallelism.symbolic.stages import layer_in
from parallelism.training.training_run import ADAM_W

SMALL: Any = {"layers": 2, "width": 12, "heads": 3, "vocabulary": 24, "sequence": 6}
FEW: Any = {"biases": False, "norm": "rms", "activation": "relu"}


def of_blocks(two: Sequence[Event], blocks: int, *, at_end: bool = False) -> list[Event]:
    """The events of so many blocks, from those of two."""
    found: list[Event] = []
    for again, run in groupby(zip(repeated(two, at_end=at_end), two, strict=True), lambda each: each[0]):
        events = [event for _, event in run]
        found += events * (blocks - 1) if again else events
    return found


def plain(events: Sequence[Event]) -> list[Any]:
    """The events without their labels, and without what there is once for all blocks."""
    return [(event.kind, [*event.extents]) for event in events if event.kind.what not in (LEFT, SIZE)]


def assert_actions_repeat(steps: TwoBlockSteps, pattern: Pattern) -> int:
    """The actions of stages of one to four blocks are those that the labels say.  Returns how many were compared."""
    laid_out = {blocks: steps._action_sections(pattern, blocks).sections for blocks in (1, 2, 3, 4)}
    own, middle = laid_out[1], steps._action_sections(pattern._replace(in_stages=True), 1).sections
    two: Mapping[Any, Sequence[Event]] = laid_out[2] if pattern.split else dict(_of_two_blocks(own, middle))
    compared = 0
    for ((place, _), *what), events in two.items():
        if {event.kind.what for event in events} <= {SIZE}:
            continue
        for blocks in (1, 2, 3, 4):
            assert plain(of_blocks(events, blocks)) == plain(laid_out[blocks][(place, blocks), *what]), (
                pattern, place, what, blocks)
            compared += 1
    for (label, *what), events in own.items():
        if label == (MIDDLE, 2):
            assert plain(of_blocks(events, 1)) == plain(own[(MIDDLE, 1), *what])
    return compared


PATTERN = Pattern(True, split=False, tp=False, sp=False, cp=1, recompute="none", zero=0)


@pytest.mark.slow
@pytest.mark.parametrize(("fused", "pattern", "more"), [
    (True, PATTERN._replace(tp=True, sp=True, recompute="full"), {}),
    (False, PATTERN._replace(split=True, recompute="selective"), FEW),
    pytest.param("elementwise", PATTERN._replace(cp=2, split=True, tp=True), {"positions": "rotary"},
                 marks=pytest.mark.slow),
    pytest.param(True, PATTERN._replace(cp=2), {"fused_attention": False, "attention_dropout": 0.1},
                 marks=pytest.mark.slow),
])
def test_actions_of_more_blocks_are_said_by_labels(fused: bool | str, pattern: Pattern, more: dict[str, Any]) -> None:
    spec = models.TransformerSpec(**(SMALL | {"dtype": "bfloat16"} | more))
    steps = TwoBlockSteps(TrainedModel.of(spec, ADAM_W), fused=fused, overlapping=fused is True)
    assert assert_actions_repeat(steps, pattern) >= 8


def test_a_block_without_a_product_has_no_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "OF_EVERY_BLOCK", ())
    steps = TwoBlockSteps(TrainedModel.of(models.TransformerSpec(**SMALL, **FEW), ADAM_W), fused=False)
    with pytest.raises(Unpriceable, match="block 0 has no product in an action, so nothing says where it ends"):
        steps.actions(PATTERN._replace(in_stages=False), 1, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(int(os.environ.get("VCLUSTER_BLOCKS", "10"))))
def test_actions_of_random_models_are_said_by_labels(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    heads = one(1, 2, 4, 6)
    spec = models.TransformerSpec(
        layers=2, width=heads * one(4, 6, 16), heads=heads, vocabulary=one(24, 48, 50),
        dtype=one("float32", "bfloat16"), sequence=one(6, 8, 12), activation=one("gelu", "relu", "swiglu"),
        norm=one("layer", "rms"), positions=one("learned", "rotary"), biases=one(True, False), tied=one(True, False),
        fused_attention=one(True, False), attention_dropout=one(0.0, 0.1), dropout=one(0.0, 0.1),
        key_value_heads=one(None, 1 if heads == 1 else heads // 2 or 1))
    for fused, overlapping in ((False, False), (True, True), ("elementwise", False), (True, False)):
        steps = TwoBlockSteps(TrainedModel.of(spec, ADAM_W), fused=fused, overlapping=overlapping)
        for _ in range(2):
            tp = one(True, False)
            pattern = Pattern(one(True, False), one(True, False), tp, tp and one(True, False), one(1, 1, 2),
                              one("none", "selective", "full"), one(0, 1))
            assert assert_actions_repeat(steps, pattern)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tied", "tp", "zero", "fused"), [
    ("bfloat16", True, True, 1, True),
    pytest.param("bfloat16", False, False, 0, False, marks=pytest.mark.slow),
    pytest.param("float32", False, True, 1, False, marks=pytest.mark.slow),
    pytest.param("float32", True, False, 1, True, marks=pytest.mark.slow),
])
def test_the_end_of_more_blocks_is_said_by_labels(dtype: str, tied: bool, tp: bool, zero: int, fused: bool) -> None:
    """Each thing that an update does for all parameters has a run of its own."""
    spec = models.TransformerSpec(**SMALL, dtype=dtype, tied=tied)
    steps = TwoBlockSteps(TrainedModel.of(spec, ADAM_W), fused=fused)
    pattern = Pattern(True, split=False, tp=tp, sp=tp, cp=1, recompute="none", zero=zero)
    pieces = steps._pieces(pattern, 1)
    ends = EndPieces(pieces.stages, [0, 1, 2, 4], inside_of(dp=0))
    updates = steps._updates(pattern._replace(in_stages=False), ends.layouts, ends.pending, replicated=True)
    whole = pattern._replace(in_stages=False)
    for blocks in (1, 3):
        layouts = {numbered(name, more): layout for name, layout in ends.layouts
                   if layer_in(name) in (None, 0) for more in range(blocks)}
        pending = {numbered(name, more): axes for name, axes in ends.pending
                   if layer_in(name) in (None, 0) for more in range(blocks)}
        laid_out = Updates(steps._step(whole, blocks, replicated=True), tuple(layouts.items()), tuple(pending.items()),
                           updates.inside, updates.replicas, fused)
        for (_, own), stage, first in zip(_labels(pattern, 1), pieces.stages, ends.first, strict=True):
            if own == 1:
                names = {numbered(name, -first) for name in stage.functions.trained}
                two = updates.events(frozenset(numbered(name, more) for name in names for more in range(2)))
                every = frozenset(numbered(name, more) for name in names for more in range(blocks))
                assert plain(of_blocks(two, blocks, at_end=True)) == plain(laid_out.events(every))
