"""Laws of strategies: any order gives the same program or a refusal, nothing is applied twice, and what is refused."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given, settings, strategies as st
from transformed import transformer

from parallelism import Executable, Mesh, ir, models
from parallelism.execution import TrainedPipeline
from parallelism.simulation import simulate
from parallelism.transforms import (
    SGD,
    Adam,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Fused,
    LocalLayers,
    MixedPrecision,
    Overlap,
    Pipeline,
    Recompute,
    SequenceParallel,
    Strategy,
    TensorParallel,
    Zero,
    train_step,
)

B, = ir.symbols("B")
MANY = int(os.environ.get("VCLUSTER_COMPOSITIONS", "300"))
STEP = train_step(transformer(layers=2).function(B), Adam())
MIXTURE = train_step(models.mixture(6, 8, 4, 2, 3, 8, 5), Adam())
PARTS = [
    DataParallel(), TensorParallel(), TensorParallel("x", "head"), TensorParallel("y", "block.0.feed_forward"),
    SequenceParallel(), ContextParallel(), Zero(1), Zero(3), MixedPrecision("float32", "float32"),
    Recompute("block.*.attention.core"), LocalLayers("block.*"), Overlap(), Fused(), Pipeline(microbatches=2),
]
REASON = re.compile(r" comes (before|after|last)|come after|, or (both|all) in one Strategy|must be in one Strategy|"
                    "is split over '.*' already|a transform is applied once")


@st.composite
def orders(draw):
    """Some transforms, and an order of them: that of their phases, but for a few."""
    kept = draw(st.lists(st.sampled_from(PARTS[2:]), unique=True, max_size=5))
    chosen = [*draw(st.sampled_from([PARTS[:2], PARTS[:1], []])), *kept]
    moved = draw(st.lists(st.sampled_from([0, 0, 0, 25, -25, 90]), min_size=len(chosen), max_size=len(chosen)))
    places = {part: (part.phase + by, draw(st.integers(0, 3))) for part, by in zip(chosen, moved, strict=True)}
    return sorted(chosen, key=places.__getitem__)


def check_order(order):
    try:
        expected = Strategy(*order)(STEP)
    except ValueError:
        expected = None
    step = STEP
    try:
        for transform in order:
            step = transform(step)
    except (ValueError, TypeError) as error:
        refused = str(error)
    else:
        assert step == expected
        return
    assert expected is None or REASON.search(refused), refused


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", [
    [DataParallel(), ContextParallel(), TensorParallel(), Zero(3), SequenceParallel()],
    [DataParallel(), TensorParallel(), Zero(3), SequenceParallel()],
])
def test_what_zero_splits_of_a_weight_is_no_dim_of_experts(order):
    check_order(order)


@pytest.mark.slow
@settings(max_examples=6)
@given(orders())
def test_any_order_gives_the_same_program_or_a_refusal_that_says_why(order):
    check_order(order)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=MANY)
@given(orders())
def test_many_orders_give_the_same_program_or_a_refusal_that_says_why(order):
    check_order(order)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("before", "transform", "step"), [
    *(([], each, STEP) for each in PARTS if not isinstance(each, SequenceParallel | Zero)),
    ([TensorParallel()], SequenceParallel(), STEP), ([], ExpertParallel(), MIXTURE),
    *(([DataParallel()], Zero(stage), STEP) for stage in (1, 2, 3)),
], ids=lambda each: "" if isinstance(each, list | ir.Function) else str(each))
def test_what_is_applied_twice_is_an_error_that_says_so(before, transform, step):
    once = Strategy(*before, transform)(step)
    with pytest.raises((ValueError, TypeError), match=r"already|is applied once"):
        transform(once)
    with pytest.raises(ValueError, match="is given twice; a transform is applied once"):
        Strategy(*before, transform, transform)


def placed(text, step=STEP, **options):
    strategy, mesh = Strategy.parse_on_mesh(text)
    made = strategy(step)
    return simulate(made, "dgx-h100", mesh=mesh, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("build", "message"), [
    (lambda: placed("tp@block.7=2"), r"tp@block\.7: @.* has no region 'block\.7'; did you mean 'block\.1'"),
    (lambda: placed("dp=2 recompute=blok.*"), "has no region 'blok.*'; did you mean 'block"),
    (lambda: placed("dp=2 recompute=block.* ,-heat"), "a word of a strategy is a name"),
    (lambda: placed("dp=2 local=layer.*"), r"has no region 'layer\.\*'; its regions are embedding, block, block\.0"),
    (lambda: placed("pp@blok.1=2 1f1b:2", batch=8), "blok.1"),
    (lambda: placed("tp=2 zero=1"), "zero=1 needs an axis 'dp', which has no size; the axes with a size are tp=2"),
    (lambda: placed("dp=2 sp:x"), "sp:x needs an axis 'x', which has no size; the axes with a size are dp=2"),
    (lambda: Executable(DataParallel("rows")(STEP), Mesh(dp=2)), "names axis 'rows', but the axes of"),
    (lambda: TrainedPipeline(Pipeline("stages")(STEP), Mesh(pp=2)), "needs an axis 'stages'; the axes of .* are 'pp'"),
    (lambda: placed("dp=2 tp=2 zero:tp=1"), "zero:tp=1: no input of .* is split over 'tp', so no gradient is summed"),
    (lambda: placed("dp=2 sp:dp"), "sp:dp: no product of .* is split over 'dp'"),
    (lambda: placed("ep=2", train_step(transformer().function(4), SGD(1))), "ep: no weight of .* is left to be split"),
    (lambda: placed("pp=2 1f1c:4"), "unknown schedule '1f1c'; did you mean '1f1b'"),
    (lambda: placed("pp=2 1f1b:4x2"), "schedule '1f1b' puts one stage on each rank, got chunks=2; chunks=1 fits"),
    (lambda: placed("pp=2 inference:4", batch=8), "the gradients of a whole program are wanted; schedule 'inference'"),
    (lambda: placed("pp=2 local:4", batch=8), "schedule 'local' sends no gradients, but stage 0 of @"),
    (lambda: placed("pp@head=4 1f1b:4", batch=8), "2 stages begin at the start and at head; .* has place for 4"),
    (lambda: placed("pp=200 1f1b:4", batch=8), "200"),
    (lambda: placed("pp=2 1f1b:4", batch=3), "a batch of 3 rows cannot be dealt to 1 x 4 microbatches"),
    (lambda: placed("pp=2 1f1b:4 dp=4 zero=1", batch=8), "a batch of 8 rows cannot be dealt to 4 x 4 microbatches"),
])
def test_what_does_not_fit_is_one_error_on_the_host(build, message):
    with pytest.raises(ValueError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)
