"""Tokens that context parallelism deals as a zigzag: which they are, that nothing else changes, and where they stay."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism import Mesh, ir, models
from parallelism.kernels import Mask
from parallelism.kernels.token_order import TokenOrder, part_of, positions_of
from parallelism.layouts import localize
from parallelism.mesh.zigzag import zigzag_order
from parallelism.simulation import simulate
from parallelism.transforms import SGD, ContextParallel, Strategy, train_step

B, = ir.symbols("B")


def spec_of(**more):
    given = {"layers": 1, "width": 16, "heads": 4, "vocabulary": 20, "sequence": 24, "feed_forward": 16, "dtype": "float64"}
    return models.TransformerSpec(**given | more)


def laid_out(text, **more):
    strategy, mesh = Strategy.parse_on_mesh(text)
    return localize(strategy(train_step(spec_of(**more).function(2), SGD(0.5))), mesh)


def dealt(localized, rank):
    """The positions of the tokens and of the targets of a rank."""
    ops = [op for op in localized.program(rank).ops if op.kind == "token_order"]
    return [op.operator.run([], op.attributes) for op in ops]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", ["cp=4", "ring=4", "ring=2 ulysses:h=2", "cp:x=2 cp=2"])
def test_each_device_has_tokens_from_both_ends(text):
    """Rank r of n has pieces r and 2n - 1 - r of 2n: arXiv:2407.21783, section 3.3.2.  With all_to_alls those of a ring
    are dealt out among them."""
    localized, pieces = laid_out(text, positions="rotary"), np.arange(24).reshape(8, 3)
    if "ulysses" in text:
        pieces = np.arange(24).reshape(4, 6)
        wanted = [part for r in (0, 1) for part in np.split(np.concatenate([pieces[r], pieces[3 - r]]), 2)]
    else:
        wanted = [np.concatenate([pieces[r], pieces[7 - r]]) for r in range(4)]
    for rank in range(4):
        tokens, targets = dealt(localized, rank)
        assert_array_equal(tokens, wanted[rank])
        assert_array_equal(targets, wanted[rank])
        assert tokens.dtype == np.int64


def test_all_devices_have_as_many_scores_in_every_step_of_a_ring():
    localized, n = laid_out("ring=4"), 4
    positions = [dealt(localized, rank)[0] for rank in range(n)]
    blocks = [op for op in localized.program(0).ops if op.kind == "attention_block"]
    assert [op["number"] for op in blocks] == [0, 1, 2, 3]
    for number, op in enumerate(blocks):
        scores = {int(Mask(causal=True).allowed(positions[r], positions[(r - number) % n]).sum()) for r in range(n)}
        assert scores == {18 if number else 21}
        assert op.flops == 2 * 2 * 2 * 4 * 4 * scores.pop()      # two products of rows x heads x features


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("text", "more"), [
    ("cp=3", {"positions": "learned", "hidden_dropout": 0.3, "attention_dropout": 0.3}), ("ring=4", {"positions": "rotary"}),
    ("cp=5", {"positions": "alibi"}), ("cp=7 tp=2 sp", {"window": 5, "positions": "rotary"}),
    ("ring=2 ulysses:h=2", {"positions": "learned", "attention_dropout": 0.3}),
    ("ulysses:h=2 ring=2", {"attention_sinks": True, "positions": "rotary"}), ("cp:x=2 cp=3", {"tied": False}),
    ("cp=4 ep=2", {"experts": models.Experts(count=4, chosen=2, width=8)}),
    ("ring=3 tp=2", {"rotary_scaling": "linear:4.0", "positions": "rotary", "key_value_heads": 2}),
])
def test_a_program_computes_the_same_in_the_order_that_is_dealt(text, more):
    step = train_step(spec_of(**more).function(2), SGD(0.5))
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=value.type.shape) if value.type.dtype.kind == "f" else rng.integers(0, 20, value.type.shape)
              for value in step.inputs]
    wanted = ir.interpret(step, arrays).outputs
    localized = laid_out(text, **more)
    assert {str(op["order"])[1:] for op in localized.function.ops if "order" in dict(op.attributes)} == {
        f":{'3+2' if 'x=2' in text else text.split()[-1 if text[0] == 'u' else 0][-1]}/24"}
    for found, alone in zip(ir.interpret(localized.function, arrays).outputs, wanted, strict=True):
        np.testing.assert_allclose(found, alone, rtol=1e-10, atol=1e-13)


def test_tables_of_positions_are_picked_from_and_their_gradients_summed_over_the_devices():
    localized = laid_out("cp=3 dp=2", positions="learned")
    inputs = {value.name: value.layout.short() for value in localized.function.inputs}
    assert inputs["p.positions"] == "[None, None]" and inputs["tokens"] == "[dp, None]"
    ops = localized.program(1).ops
    kinds = [op.kind for op in ops if op.kind.startswith("arranged")]
    assert kinds == ["arranged"] * 3 + ["arranged_gradient"]      # tokens, positions, targets
    summed = {op.inputs[0].type.shape: op["axes"] for op in ops if op.kind == "all_reduce"}
    assert (summed[8, 16], summed[24, 16]) == (("dp",), ("cp",))   # over dp while it has the tokens of a device alone


@pytest.mark.parametrize(("build", "exchange"), [
    (lambda: train_step(spec_of(fused_attention=False).function(2), SGD(0.5)), "all_gather"),
    (lambda: train_step(spec_of(next_tokens=1).function(2), SGD(0.5)), "all_gather"),
    (lambda: spec_of(experts=models.Experts(count=4, chosen=2, width=8, capacity=1.0)).function(2), "p2p"),
    (lambda: spec_of().function(2), "a2a"),
    (lambda: ir.record(lambda p, x: ir.apply("attention", *[(x * p["w"]).reshape((2, 8, 2, 3))] * 3, scale=1.0, mask="whole",
                                             rate=0, seed=0, whole=(2, 8, 2, 3), starts=(0,) * 4)[0].sum(),
                       {"w": ir.TensorType("f8", (6,))}, ir.TensorType("f8", (2, 8, 6))), "p2p"),
], ids=["scores are written", "tokens are shifted", "experts drop the last", "all tokens of some heads", "nothing is hidden"])
def test_where_the_order_counts_or_nothing_is_gained_tokens_stay_in_order(build, exchange):
    step = ContextParallel("cp", exchange)(build())
    assert not [op for op in step.ops if op.kind == "token_order" or "order" in dict(op.attributes)]


@pytest.mark.takes_seconds
def test_stages_deal_tokens_over_equally_many_devices():
    strategy = Strategy.parse("pp 1f1b:2,meshes=cp=2|cp=4 ring")
    step = strategy(train_step(spec_of(layers=2).function(B), SGD(0.5)))
    with pytest.raises(ValueError, match="in one order: stages need equally many devices along cp, got 2, 4"):
        simulate(step, "dgx-h100", mesh=Mesh(devices=6), batch=4)


def test_an_order_is_read_as_it_is_written():
    for order in (TokenOrder(1, ("cp",)), TokenOrder(0, ("y", "cp")), TokenOrder(2, devices=(2, 3), tokens=48)):
        assert TokenOrder.parse(str(order)) == order
    for text in ("", "cp", "1:", "1:4", "1:cp/8", "1:4+x/8", "1:0/8", "1:cp+", f"1:{'9' * 20}/8", "1:cp\n"):
        with pytest.raises(ValueError, match=r"an order of tokens is a dim and axes, or devices and tokens, as .* got"):
            TokenOrder.parse(text)


def test_positions_are_plain_along_other_dims_and_before_the_devices_are_known():
    order = str(TokenOrder(1, devices=(3,), tokens=12))
    assert positions_of(order, 1, 4, 4).tolist() == [2, 3, 8, 9] == zigzag_order(12, 3)[4:8].tolist()
    assert positions_of(order, 0, 4, 4).tolist() == positions_of("1:cp", 1, 4, 4).tolist() == [4, 5, 6, 7]
    rows, tokens = part_of(order, (3, 4), (2, 3))
    assert (rows, tokens.tolist()) == (slice(3, 5), [2, 3, 8])
    assert part_of("", (3, 4), (2, 3)) == [slice(3, 5), slice(4, 7)]


def test_a_table_that_is_split_is_not_gathered_for_tokens_that_were_dealt():
    """Under sequence parallelism the rows that were looked up are reduce-scattered, as where tokens keep their order."""
    strategy, mesh = Strategy.parse_on_mesh("ring=2 tp=2 sp")
    spec = models.TransformerSpec(layers=1, width=16, heads=4, vocabulary=10, sequence=8, positions="rotary", tied=False)
    program = localize(strategy(train_step(spec.function(3), SGD(0.1))), mesh).program()
    moved = [op.kind for op in program.ops if op.operator.received is not None and op.region == "embedding"]
    assert any(op.kind == "arranged" for op in program.ops) and moved == ["reduce_scatter"]
