"""What strategies communicate and hold, against the closed forms of the papers that describe them."""

from __future__ import annotations

from collections import Counter

import pytest
from transformed import transformer

from parallelism import Executable, Mesh, ir, models
from parallelism.ir.passes.chunked_collectives import SPLITS
from parallelism.layouts import localize
from parallelism.simulation import simulate
from parallelism.transforms import SGD, Adam, Parts, Strategy, carried, categories, train_step

ITEM = 8
LAYERS, BATCH, SEQUENCE, WIDTH, VOCABULARY = 3, 8, 12, 48, 24


def gpt():
    return transformer(layers=LAYERS, width=WIDTH, heads=12, vocabulary=VOCABULARY, sequence=SEQUENCE).function(BATCH)


def deep():
    """Products alone, with extents that divide by 2 and 4."""
    return models.mlp((16, 32, 8, 24, 4), 8)


def communication(step, text):
    """Per collective, axes, and part of the step: how many there are, and the bytes that a device receives.

    The bytes of single numbers, such as the loss, are left out: they do not divide.
    """
    strategy, mesh = Strategy.parse_on_mesh(text)
    counts, received = Counter(), Counter()
    for op in localize(strategy(step), mesh).program().ops:
        if op.bytes_received:
            part = "update" if op.region == "update" else (op.region or "").partition(".")[0]
            key = op.kind, ",".join(op["axes"]), part if part in ("update", "gradient", "loss") else "forward"
            counts[key] += 1
            received[key] += op.bytes_received if op.inputs[0].type.shape else 0
    return counts, received


def parameter_bytes(step):
    return sum(value.type.nbytes for value in Parts.of(step).parameters)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("n", [2, 4])
def test_data_parallelism_and_the_stages_of_zero_move_what_the_paper_says(n):
    # Rajbhandari et al. 2020, section 7: 2 Psi for data parallelism and stages 1 and 2, 3 Psi for stage 3.
    step = train_step(deep(), Adam())
    whole, tensors = parameter_bytes(step), len(Parts.of(step).parameters)
    ring = whole * (n - 1) // n
    assert communication(step, f"dp={n}") == (
        {("all_reduce", "dp", "gradient"): tensors, ("all_reduce", "dp", "loss"): 1},
        {("all_reduce", "dp", "gradient"): 2 * ring, ("all_reduce", "dp", "loss"): 0})
    for stage, where in ((1, "update"), (2, "gradient")):
        assert communication(step, f"dp={n} zero={stage}") == (
            {("reduce_scatter", "dp", where): tensors, ("all_gather", "dp", "update"): tensors,
             ("all_reduce", "dp", "loss"): 1},
            {("reduce_scatter", "dp", where): ring, ("all_gather", "dp", "update"): ring,
             ("all_reduce", "dp", "loss"): 0})
    # The backward reads no bias and not the first weight: those are gathered in the forward alone.
    again = [value for value in Parts.of(step).parameters if value.type.ndim == 2][1:]
    assert communication(step, f"dp={n} zero=3") == (
        {("all_gather", "dp", "forward"): tensors, ("all_gather", "dp", "gradient"): len(again),
         ("reduce_scatter", "dp", "gradient"): tensors, ("all_reduce", "dp", "loss"): 1},
        {("all_gather", "dp", "forward"): ring, ("all_reduce", "dp", "loss"): 0,
         ("all_gather", "dp", "gradient"): sum(v.type.nbytes for v in again) * (n - 1) // n,
         ("reduce_scatter", "dp", "gradient"): ring})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("m", "n"), [(2, 4), (3, 2)])
def test_hybrid_sharding_gathers_inside_a_node_and_sums_parts_between_nodes(m, n):
    # Zhao et al. 2023, arXiv:2304.11277, section 3.2.2: parameters are gathered over the n devices of a node, gradients
    # reduce-scattered over them, and each part is summed by an all_reduce over the m nodes.
    step = train_step(deep(), Adam())
    whole, tensors = parameter_bytes(step), len(Parts.of(step).parameters)
    again = [value for value in Parts.of(step).parameters if value.type.ndim == 2][1:]
    counts, received = communication(step, f"dp:node={m} dp={n} zero=3")
    inside = whole * (n - 1) // n
    assert counts == {
        ("all_gather", "dp", "forward"): tensors, ("all_gather", "dp", "gradient"): len(again),
        ("reduce_scatter", "dp", "gradient"): tensors, ("all_reduce", "node", "gradient"): tensors,
        ("all_reduce", "node,dp", "loss"): 1}
    assert received["all_gather", "dp", "forward"] == received["reduce_scatter", "dp", "gradient"] == inside
    assert received["all_gather", "dp", "gradient"] == sum(v.type.nbytes for v in again) * (n - 1) // n
    # A device sums the n-th part; where that does not divide by m, the closed form of a ring has rounded up.
    assert received["all_reduce", "node", "gradient"] == pytest.approx(2 * whole // n * (m - 1) / m, abs=ITEM * tensors)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("n", [2, 4])
def test_tensor_parallelism_is_that_of_megatron(n):
    # Shoeybi et al. 2019, section 3 and figure 4: a layer has 2 all_reduces of b s h forward, and 2 backward; the
    # table of tokens has one forward, the last product one backward, and the loss 3, two of b s numbers and one of one.
    counts, received = communication(train_step(gpt(), SGD(0.1)), f"tp={n}")
    activation = 2 * ITEM * BATCH * SEQUENCE * WIDTH * (n - 1) // n
    assert counts == {("all_reduce", "tp", "forward"): 2 * LAYERS + 1, ("all_reduce", "tp", "gradient"): 2 * LAYERS + 1,
                      ("all_reduce", "tp", "loss"): 3}
    assert received == {
        ("all_reduce", "tp", "forward"): (2 * LAYERS + 1) * activation,
        ("all_reduce", "tp", "gradient"): (2 * LAYERS + 1) * activation,
        ("all_reduce", "tp", "loss"): 2 * ITEM * 2 * BATCH * SEQUENCE * (n - 1) // n}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("n", [2, 4])
def test_sequence_parallelism_is_that_of_korthikanti(n):
    # Korthikanti et al. 2022, section 4.2.2: an all_gather and a reduce_scatter in place of each all_reduce, and an
    # all_gather more in the backward of each product by columns, of whose input each device keeps its part alone.
    counts, received = communication(train_step(gpt(), SGD(0.1)), f"tp={n} sp")
    piece = ITEM * BATCH * SEQUENCE * WIDTH * (n - 1) // n
    pairs = 2 * LAYERS + 1
    expected = {("all_gather", "tp", "forward"): pairs, ("reduce_scatter", "tp", "forward"): pairs,
                ("reduce_scatter", "tp", "gradient"): pairs, ("all_gather", "tp", "gradient"): 2 * pairs}
    assert {key: count for key, count in counts.items() if key[0] != "all_reduce"} == expected
    assert {key: received[key] for key in expected} == {key: count * piece for key, count in expected.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("n", [2, 4])
def test_chunks_beside_products_are_as_many_as_devices_or_four_and_move_as_many_bytes(n):
    # Transformer Engine, pytorch/module/base.py, initialize_ub: by chunks are, forward, the gathers of qkv and of the first
    # product of the feed-forward block (here of the head, too), and the scatters of the other two; and, backward, the gathers
    # of the gradients of these two.  The others of the backward are in bulk, beside the product of another gradient.
    # A gather is a ring with as many chunks as devices, a scatter is in num_splits, 4 if nobody says another number.
    spec = transformer(layers=LAYERS, width=WIDTH, heads=12, vocabulary=VOCABULARY, sequence=3 * n * n)
    step = train_step(spec.function(BATCH), SGD(0.1))
    (counts, received), (cut, received_cut) = (communication(step, f"tp={n} sp{word}") for word in ("", " tp_overlap"))
    pairs = 2 * LAYERS + 1
    assert {key: count for key, count in cut.items() if key[0] != "all_reduce"} == {
        ("all_gather", "tp", "forward"): pairs * n, ("reduce_scatter", "tp", "forward"): 2 * LAYERS * SPLITS + 1,
        ("reduce_scatter", "tp", "gradient"): pairs, ("all_gather", "tp", "gradient"): 2 * pairs + 2 * LAYERS * (n - 1)}
    assert received_cut == received and counts[("all_gather", "tp", "gradient")] == 2 * pairs


def test_all_strategies_together_move_the_sum_of_what_each_moves():
    step = train_step(gpt(), SGD(0.1))
    _, both = communication(step, "dp=2 tp=4")
    _, tensor = communication(step, "tp=4")
    # A replica has half of the rows, so half of the activations; and a quarter of what is split, as gradients.
    forward = "all_reduce", "tp", "forward"
    assert both[forward] * 2 == tensor[forward]
    split = sum(value.type.nbytes // (4 if value.layout else 1)
                for value in Parts.of(Strategy.parse("tp")(step)).parameters)
    assert both["all_reduce", "dp", "gradient"] + both["all_reduce", "dp", "update"] == split


@pytest.mark.takes_seconds
@pytest.mark.sampled(8, 1)
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("stage", "weights", "gradients", "state"), [
    (0, 1, 1, 1), (1, 1, 1, None), (2, 1, None, None), (3, None, None, None)])
def test_memory_is_that_of_the_stages_of_zero(n, stage, weights, gradients, state):
    # Rajbhandari et al. 2020, section 5: of weights, gradients and state what is split takes one n-th.
    step = train_step(deep(), Adam())
    whole = parameter_bytes(step)
    strategy, mesh = Strategy.parse_on_mesh(f"dp={n}" + (f" zero={stage}" if stage else ""))
    step = strategy(step)
    executable = Executable(step, mesh, categories=categories(step), donate=carried(step))
    trace = simulate(executable, "dgx-h100")
    for rank in range(n):
        assert trace.peak_bytes(rank, "outputs") == 8      # the loss: all else lies in the memory of what was before
        assert trace.peak_bytes(rank, "weights") * (weights or n) == whole
        assert trace.peak_bytes(rank, "gradients") * (gradients or n) == whole
        assert (trace.peak_bytes(rank, "optimizer") - 8) * (state or n) == 2 * whole      # 8: the number of updates


def test_a_symbolic_number_of_devices_has_the_same_closed_form():
    dp, = ir.symbols("dp")
    step = Strategy.parse("dp zero=2")(train_step(deep(), Adam()))
    whole = parameter_bytes(step)
    received = sum(op.bytes_received for op in localize(step, {"dp": dp}).program().ops if op.outputs[0].type.shape)
    assert str(received) == f"{2 * whole}-{2 * whole}/dp"
    assert localize(step, Mesh(dp=4)).program() == localize(step, {"dp": dp}).program().specialize(dp=4)
