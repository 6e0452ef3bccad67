"""Overlap: what the program says, the order in which a device runs it, and when it waits."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from transformed import MODELS, assert_trained, interpreted, model_step

from parallelism import Mesh, ir, models
from parallelism.execution import Executable, operation_on
from parallelism.execution.device_program import ProgramStep, StartStep, WaitStep
from parallelism.ir.passes.waiting import in_steps
from parallelism.layouts import localize, localize_symbolically
from parallelism.simulation import simulate
from parallelism.transforms import (
    SGD,
    Adam,
    DataParallel,
    MixedPrecision,
    Overlap,
    Parts,
    Strategy,
    Zero,
    carried,
    train_step,
)

B, = ir.symbols("B")


def steps(text, step, mesh):
    """A line for each collective, start and wait of rank 0; of other ops the names of the outputs."""
    lines = []
    for each in operation_on(Strategy.parse(text)(step), mesh).of_class(0).steps:
        match each:
            case StartStep(number=number, ops=ops):
                lines.append(f"start {number} {ops[0].kind} {' '.join(op.inputs[0].name for op in ops)}")
            case WaitStep(number=number):
                lines.append(f"wait {number}")
            case ProgramStep(op=op):
                lines.append(" ".join(value.name for value in op.outputs))
    return lines


def only_calls(lines):
    return [line for line in lines if line.startswith(("start", "wait"))]


# -- the text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "overlap"), [
    ("overlap", Overlap()), ("overlap=50MB", Overlap(50 * 2**20)), ("overlap=ahead:0", Overlap(ahead=0)),
    ("overlap=3KB,ahead:2", Overlap(3072, 2)), ("overlap=1GB", Overlap(2**30)), ("overlap=17B", Overlap(17)),
])
def test_the_text_of_overlap_is_read_back_with_and_without_sizes(text, overlap):
    assert str(Strategy(overlap)) == text and Strategy.parse(text) == Strategy(overlap)
    assert Strategy.parse_on_mesh(f"dp=2 {text}")[0] == Strategy(DataParallel(), overlap)
    assert Strategy(DataParallel(), overlap).text_on(Mesh(dp=2)) == f"dp=2 {text}"


def test_a_bucket_of_25_megabytes_is_the_default():
    assert Strategy.parse("overlap=25MB") == Strategy(Overlap()) and Overlap().bucket_bytes == 26_214_400


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Overlap(0), "bucket_bytes of Overlap must be a whole number of at least 1, got 0"),
    (lambda: Overlap(2.5), "bucket_bytes of Overlap must be a whole number of at least 1, got 2.5"),
    (lambda: Overlap(ahead=-1), "ahead of Overlap must be a whole number of at least 0, got -1"),
    (lambda: Overlap(ahead=True), "ahead of Overlap must be a whole number of at least 0, got True"),
    (lambda: Strategy.parse("overlap=many"), "such as overlap=25MB,ahead:2; got 'many'"),
    (lambda: Strategy.parse("overlap=1MB,2MB"), "such as overlap=25MB,ahead:2; got '1MB,2MB'"),
    (lambda: Strategy.parse("overlap=ahead:x"), "such as overlap=25MB,ahead:2; got 'ahead:x'"),
    (lambda: Strategy.parse("overlap overlap=1MB")(models.mlp((3, 2), 4)),
     "@mlp is overlapped already, by overlap"),
])
def test_what_is_wrong_with_overlap_is_one_error(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
    with pytest.raises(TypeError, match="only a Function can be transformed, got int"):
        Overlap()(3)


def test_the_program_stays_in_order_and_says_that_it_is_overlapped():
    step = model_step("mlp", 4, SGD(0.1))
    plain, told = DataParallel()(step), Strategy(DataParallel(), Overlap(3072, 2))(step)
    assert told.ops == plain.ops and told.attributes == (("overlap_ahead", 2), ("overlap_bucket_bytes", 3072))
    assert str(told).splitlines()[1:] == str(plain).splitlines()[1:]
    assert str(told).splitlines()[0].endswith(" attributes {overlap_ahead = 2, overlap_bucket_bytes = 3072} {")
    assert ir.parse(str(told)) == told != plain
    assert Overlap.of(told) == Overlap(3072, 2) and Overlap.of(plain) is None
    assert_trained(interpreted(told), interpreted(step), 0)


def test_overlap_may_stand_anywhere_in_the_order():
    loss = MODELS["gpt"](4)
    step, whole = train_step(loss, Adam(0.1)), Strategy(DataParallel(), Zero(2), MixedPrecision("float32"), Overlap())
    told = whole(step)
    assert Zero(2)(DataParallel()(MixedPrecision("float32")(Overlap()(step)))) == told
    assert train_step(Overlap()(loss), Adam(0.1)) == Overlap()(step)
    assert Overlap.of(Parts.of(told).joined()) == Overlap.of(ir.gradient(Overlap()(loss))) == Overlap()
    assert Overlap.of(localize(told, Mesh(dp=2)).function) == Overlap()


# -- the order of a device ---------------------------------------------------------------------------------------------


def test_sums_of_gradients_start_in_buckets_during_the_backward_and_are_waited_for_by_the_update():
    step = train_step(models.mlp((6, 8, 5, 3), 4), SGD(0.1))
    lines = steps("dp overlap=300B", step, Mesh(dp=2))
    # The loss and lr * gradients: 8 + 24 + 120 + 40 + 320 bytes are a bucket, then 64 + 384.
    assert only_calls(lines) == [
        "start 0 all_reduce 14.1 29.1 28.1 26.1 25.1", "start 1 all_reduce 19.1 18.1", "wait 1", "wait 0"]
    between = lines[lines.index("grad.p.w1"):lines.index("grad.p.b0")]
    assert between[1:3] == ["25.1", "start 0 all_reduce 14.1 29.1 28.1 26.1 25.1"] and len(between) > 5
    assert lines[-8:-3] == ["wait 1", "next.p.w0", "next.p.b0", "wait 0", "next.p.w1"]


def test_sums_that_cannot_be_cut_evenly_are_calls_with_others_and_two_are_under_way():
    step = train_step(models.mlp((6, 8, 5, 3), 4), Adam(0.1))
    (all_in_one,) = (line for line in only_calls(steps("dp zero=2 overlap", step, Mesh(dp=2))) if "reduce_sc" in line)
    assert len(all_in_one.split()) - 3 == 6
    calls = only_calls(steps("dp zero=2 overlap=1B", step, Mesh(dp=2)))
    scatters = [line for line in calls if "reduce_scatter" in line]
    assert [len(line.split()) - 3 for line in scatters] == [1] * 6
    begun = ended = 0
    for line in calls:
        begun += "reduce_scatter" in line
        ended += line in [f"wait {each.split()[1]}" for each in scatters]
        assert begun - ended <= 2
    assert ended == 6


def test_a_gradient_of_zero_1_is_summed_where_the_backward_has_made_it():
    step = train_step(models.mlp((6, 8), 4), Adam(0.1))
    for text in ("dp zero=1", "dp zero=2", "dp zero=1 precision=bf16"):
        lines = steps(f"{text} overlap=1B", step, Mesh(dp=2))
        scatters = [i for i, line in enumerate(lines) if "reduce_scatter" in line]
        update = next(i for i, line in enumerate(lines) if line.startswith("wait"))
        assert len(scatters) == 2 and max(scatters) < update, text
        gathers = [line for line in lines[update:] if "all_gather" in line]
        assert len(gathers) == 2 and lines[-2].startswith("wait") and lines[-1].startswith("wait")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ahead", "expected"), [
    (0, ["start w0", "wait w0", "start w1", "wait w1", "start w2", "wait w2", "start w2", "wait w2", "start w1"]),
    (1, ["start w0", "start w1", "wait w0", "start w2", "wait w1", "start w2", "wait w2", "start w1", "wait w2"]),
    (2, ["start w0", "start w1", "start w2", "wait w0", "start w2", "wait w1", "start w1", "wait w2", "wait w2"]),
    (9, ["start w0", "start w1", "start w2", "start w2", "start w1", "wait w0", "wait w1", "wait w2", "wait w2"]),
])
def test_gathers_of_parameters_start_some_layers_ahead(ahead, expected):
    step = train_step(models.mlp((6, 8, 10, 4), 4), Adam(0.1), parameters=["p.w0", "p.w1", "p.w2"])
    calls = only_calls(steps(f"dp zero=3 overlap=ahead:{ahead}", step, Mesh(dp=2)))
    names = {line.split()[1]: line.split()[3] for line in calls if "all_gather p.w" in line}  # frozen biases go with them
    found = [line.split() for line in calls if line.split()[1] in names]
    assert [f"{line[0]} {names[line[1]].removeprefix('p.')}" for line in found][:9] == expected


def test_a_layer_is_a_region_up_to_its_first_number():
    step = model_step("llama", 4, SGD(0.1))
    calls = only_calls(steps("dp zero=3 overlap", step, Mesh(dp=2)))
    first = next(i for i, line in enumerate(calls) if line.startswith("wait"))
    gathered = [line.split()[3:] for line in calls[:first]]
    # While the embedding is gathered, so is all of block 0, in one call.
    assert [{name.split(".")[1] for name in names} for names in gathered] == [{"tokens"}, {"0"}]
    assert len(gathered[1]) > 5


def test_a_collective_of_activations_starts_behind_the_one_before():
    step = model_step("gpt", 4, SGD(0.1))
    lines = steps("tp sp overlap", step, Mesh(tp=2))
    calls = only_calls(lines)
    ahead = sum(one.startswith("start") and other.startswith("start") for one, other in pairwise(calls))
    plain = steps("tp sp", step, Mesh(tp=2))
    assert ahead > 3 and not only_calls(plain)
    program = operation_on(Strategy.parse("tp sp overlap")(step), Mesh(tp=2)).of_class(0)
    assert sorted(map(str, program.function.ops)) == sorted(
        map(str, operation_on(Strategy.parse("tp sp")(step), Mesh(tp=2)).of_class(0).function.ops))


def test_collectives_of_a_backward_run_beside_the_product_of_the_other_gradient():
    """The gather of what was multiplied starts before the product for its gradient, which the other one follows."""
    step = Strategy.parse("tp sp")(model_step("gpt", 4, SGD(0.1)))
    program = operation_on(step, Mesh(tp=2), overlapping=True).of_class(0)
    found: dict[int, list[str]] = {}
    under_way: dict[int, str] = {}
    for each in program.steps:
        match each:
            case StartStep(number=number, ops=ops):
                under_way[number] = ops[0].kind
                found[number] = [ops[0].kind]
            case WaitStep(number=number):
                del under_way[number]
            case ProgramStep(op=op):
                for number in under_way:
                    found[number].append(op.kind)
    kinds = [tuple(each[:1] + [kind for kind in each if kind in ("matmul", "einsum")]) for each in found.values()]
    assert not under_way and {kind for kind, *_ in kinds} == {"all_gather", "reduce_scatter"}
    assert all(len(each) == 2 for each in kinds), kinds
    blocking = [each.op.kind for each in program.steps if isinstance(each, ProgramStep)]
    plain = operation_on(step, Mesh(tp=2)).of_class(0)
    assert sorted(map(str, program.function.ops)) == sorted(map(str, plain.function.ops))
    # What the forward communicates, and what both products of a backward read, is waited for at once.
    assert blocking.count("all_gather") > blocking.count("reduce_scatter") > 1


def test_memory_of_what_is_under_way():
    """A sum by all_reduce takes the memory of its terms; the input of a reduce_scatter is freed when it is over."""
    step = train_step(models.mlp((6, 8), 4), Adam(0.1))
    for text, held, freed in (("dp", 0, 0), ("dp zero=2", 4 * 8 * (6 + 1), 8 * 8 * (6 + 1))):
        program = operation_on(Strategy.parse(f"{text} overlap")(step), Mesh(dp=2)).of_class(0)
        sums = [each for each in program.steps if isinstance(each, StartStep) and each.call.kind != "all_gather"]
        waits = {each.number: each for each in program.steps if isinstance(each, WaitStep)}
        assert sum(nbytes for _, nbytes in sums[-1].held) == held, text
        assert sum(nbytes for _, nbytes in waits[sums[-1].number].freed) == freed, text


@pytest.mark.takes_seconds
@pytest.mark.sampled(15, 9)
@pytest.mark.parametrize("text", ["dp=2", "dp=2 tp=2", "dp=3 tp=2 sp", "pp=2 1f1b:3 dp=2", "dp=2 fused"])
@pytest.mark.parametrize("rule", [Adam(0.1), SGD(0.1), SGD(0.1, 0.5)])
def test_memory_is_of_the_categories_that_it_is_of_without_overlap(text, rule):
    strategy, mesh = Strategy.parse_on_mesh(text)
    batch = {"batch": 6} if "pp" in text else {}
    step = strategy(train_step(MODELS["mlp"](ir.symbol("B") if batch else 6), rule))
    plain, trace = (simulate(Strategy(each)(step) if not batch else replace(step, function=each(step.function)),
                             "dgx-h100", mesh=mesh, **batch) for each in (Strategy(), Overlap(100)))
    names = {event.name for event in plain.filter(kind="memory")}
    assert names == {event.name for event in trace.filter(kind="memory")}
    for name in names - {"activations", "gradients"}:
        assert plain.peaks(name) == trace.peaks(name), name
    for rank, nbytes in plain.peaks("gradients").items():
        # The update scales a gradient before it is summed: both are there for a moment.
        largest = 6 * 8 * 8 if isinstance(rule, SGD) else 0
        assert nbytes <= trace.peaks("gradients")[rank] <= nbytes + largest


def test_an_op_waits_before_it_writes_over_what_is_being_sent():
    x, y = (ir.Value(name, ir.TensorType("f64", (4,))) for name in "xy")
    z, s, n = (ir.Value(name, ir.TensorType("f64", (4,))) for name in "zsn")
    group = {"axes": ("dp",), "group": 2}
    ops = [ir.Op("negative", (x,), {}, (y,)), ir.Op("permute", (y,), {**group, "pairs": ((0, 1), (1, 0))}, (z,)),
           ir.Op("accumulate", (y, x), {}, (s,)), ir.Op("add", (s, z), {}, (n,))]
    function = ir.Function("f", (x,), ops, (n,))
    assert [type(each).__name__ for each in in_steps(function, [(1,)], {})] == ["Run", "Start", "Wait", "Run", "Run"]
    assert [type(each).__name__ for each in in_steps(function, [], {})] == ["Run"] * 4


def test_the_order_is_one_for_all_devices_however_uneven_they_are():
    step = model_step("mlp", 7, Adam(0.01))
    executable = operation_on(Strategy.parse("dp tp zero=3 overlap=100B")(step), Mesh(dp=3, tp=2))
    assert isinstance(executable, Executable) and len(executable.programs.classes) == 6
    assert len({tuple((type(each), getattr(each, "number", None)) for each in executable.of_class(number).steps)
                for number in range(6)}) == 1


def weights_that_are_views(p, x):
    """Two layers; each reads two weights through views."""
    for layer in ("a", "b"):
        with ir.region(layer):
            x = np.tanh(x @ p[f"{layer}.up"].reshape(4, 6)) @ p[f"{layer}.down"].reshape(6, 4)
    return np.sum(x)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_view_of_a_parameter_is_made_where_its_gather_starts(ahead):
    types = {f"{layer}.{name}": ir.TensorType("f64", (24,)) for layer in "ab" for name in ("up", "down")}
    step = train_step(ir.record(weights_that_are_views, types, ir.TensorType("f64", (2, 4))), SGD(0.1))
    lines = steps(f"dp zero=3 overlap=ahead:{ahead}", step, Mesh(dp=2))
    gathers = [line for line in only_calls(lines) if "all_gather" in line]
    started = lines[:lines.index("wait 0")]
    # Of the layer itself, and of those ahead of it, one call each; the third is the first of the backward.
    assert sum("all_gather" in line for line in started) == 1 + ahead
    assert [len(line.split()) - 3 for line in gathers] == [2, 2, 2, 1]


@pytest.mark.parametrize(("b", "c", "calls"), [
    (4, 2, ["p.a p.b p.c", "p.c p.b"]), (5, 2, ["p.a p.b p.c", "p.c p.b"]), (5, 6, ["p.a p.b p.c", "p.c p.b"]),
])
def test_the_gathers_of_a_layer_are_one_call_however_they_are_cut(b, c, calls):
    """FSDP gathers a block as one array (Zhao et al. 2023, arXiv:2304.11277, section 4.2.1)."""
    def loss(p, x):
        with ir.region("block.0"):
            return np.sum(np.tanh(x @ p["a"]) @ p["b"] @ p["c"])

    types = {"a": ir.TensorType("f8", (3, b)), "b": ir.TensorType("f8", (b, c)), "c": ir.TensorType("f8", (c, 8))}
    step = train_step(ir.record(loss, types, ir.TensorType("f8", (4, 3))), SGD(0.1))
    lines = steps("dp zero=3 overlap", step, Mesh(dp=2))
    started = only_calls(lines[:lines.index("wait 0")])  # of the backward, too: it is the next layer
    assert [" ".join(line.split()[3:]) for line in started] == calls


def test_a_message_that_is_stacked_starts_no_collective_before_it_is_there():
    """The next stage stacks what it receives: the views of that were taken for parameters, and their sums started."""
    def loss(p, dense, ids, y):
        with ir.region("tables"):
            d, a, b = dense @ p["w"], p["t0"][ids], p["t1"][ids]
        with ir.region("top"):
            z = np.stack([d, a, b], axis=1)
            return np.mean((np.einsum("bij,bij->b", z, z) - y) ** 2)

    types = {name: ir.TensorType("f64", (rows, 4)) for name, rows in (("t0", 6), ("t1", 6), ("w", 3))}
    x, ids, y = ir.TensorType("f64", (B, 3)), ir.TensorType("i64", (B,)), ir.TensorType("f64", (B,))
    program = ir.record(loss, types, x, ids, y)
    strategy, mesh = Strategy.parse_on_mesh("pp@top=2 1f1b:2 tp=2 overlap")
    trace = simulate(strategy(train_step(program, SGD(0.1))), "dgx-h100", mesh=mesh, batch=8)
    assert trace.count("reduce_scatter") + trace.count("all_reduce") > 0


@pytest.mark.takes_seconds
@pytest.mark.sampled(24, 2)
@pytest.mark.parametrize("text", [
    "dp=4 zero=3 overlap", "dp=2 tp=2 zero=2 overlap=1KB", "dp=2 overlap=300B", "dp=3 zero=1 overlap=1B",
    "dp=2 tp=2 sp overlap=200B,ahead:2", "dp=2 zero=3 precision=bf16 overlap=1KB,ahead:0"])
@pytest.mark.parametrize("model", ["gpt", "llama", "mlp", "mixture"])
def test_the_memory_of_a_program_counts_what_is_under_way(model, text):
    """`ir.peak_bytes` of a device's program is what a simulation holds, and so is the formula."""
    strategy, mesh = Strategy.parse_on_mesh(text)
    step = strategy(model_step(model, 24, Adam(0.1)))
    held = simulate(step, "dgx-h100", mesh=mesh).peak_bytes(0)
    local = localize(step, mesh)
    said = ir.peak_bytes(local.program(0), carried(step))
    symbolic = localize_symbolically(step, mesh.axes)
    formula = ir.peak_bytes(symbolic.program(), carried(step))
    assert str(formula) == f"peak(@{step.name})" and formula.symbols == {*mesh.axes}
    assert said == held
    try:
        symbolic.on(mesh)
    except ValueError as error:
        assert "is not split evenly" in str(error)      # noqa: PT017  (only then there is a formula)
        return
    assert formula.specialize(**dict(mesh.shape)) == said
    assert (2 * formula + 8).specialize(**dict(mesh.shape)) == 2 * said + 8
    assert ir.specialized(formula.specialize(dp=ir.symbol("n")), {**mesh.shape, "n": mesh.shape["dp"]}) == said


def test_a_program_says_that_it_is_overlapped_on_a_device_too():
    step = Strategy.parse("dp zero=3 overlap")(model_step("mlp", 4, SGD(0.1)))
    local = localize(step, Mesh(dp=2)).program(0)
    assert Overlap.of(local) == Overlap() == Overlap.of(ir.parse(str(local)))
    assert ir.peak_bytes(local) >= ir.peak_bytes(replace(local, attributes=()))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["dp zero=1 overlap=1MB pp 1f1b:3", "tp sp dp zero=1 overlap=1MB pp 1f1b:3"])
def test_sums_of_gradients_go_on_behind_the_last_backward_of_a_stage(text):
    spec = models.TransformerSpec(layers=4, width=512, heads=2, vocabulary=16, sequence=4)
    mesh = Mesh(pp=2, dp=2, tp=2) if "tp" in text else Mesh(pp=2, dp=2)
    step = Strategy.parse(text)(train_step(spec.function(B), Adam(0.1)))
    trace = simulate(step, "dgx-h100", mesh=mesh, batch=12, op_by_op=True)
    for rank in range(mesh.size):
        events = list(trace.filter(rank=rank))
        sums = {event.work for event in events if event.name == "reduce_scatter" and event.axes == ("dp",)} - {None}
        waits = [i for i, event in enumerate(events) if event.kind == "wait" and event.work in sums]
        acts = [i for i, event in enumerate(events) if event.phase == "B" or event.kind == "send"]
        assert len(sums) > 4 and len(waits) == len(sums) and max(acts) < min(waits)


@pytest.mark.takes_seconds
def test_sums_of_a_microbatch_are_added_up_when_the_next_one_starts():
    step = Strategy.parse("dp zero=3 overlap=1B pp 1f1b:2")(train_step(models.mlp((6, 8, 5, 3), B), SGD(0.1)))
    trace = simulate(step, "dgx-h100", mesh=Mesh(pp=1, dp=2), batch=8, op_by_op=True)
    told = {("collective", "reduce_scatter"): "sum", ("compute", "accumulate"): "add"}
    found = [told[event.kind, event.name] for event in trace.filter(rank=0) if (event.kind, event.name) in told]
    assert found == 2 * 3 * ["sum", "add", "add"]    # a layer is one call


# -- units of FSDP -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "layers", "again"), [(4, 3, False), (3, 2, True), (2, 1, True)])
def test_fsdp_gathers_and_sums_a_block_as_one_array(n, layers, again):
    """As ``fully_shard`` of each block does (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, `unshard` and
    `post_backward`): one all_gather for the forward, one for the backward, which may compute the forward again, and one
    reduce_scatter in the dtype of gradients, in each microbatch."""
    width, microbatches = 12, 2
    spec = models.TransformerSpec(layers=layers, width=width, heads=3, vocabulary=20, sequence=8, tied=False)
    text = f"fsdp={n} precision=bf16{' recompute=block.*' * again} pp=1 1f1b:{microbatches}"
    strategy, mesh = Strategy.parse_on_mesh(text)
    trace = simulate(strategy(train_step(spec.function(B), Adam(0.1))), "dgx-h100", mesh=mesh, batch=2 * n, op_by_op=True)
    calls = [event for event in trace.filter(rank=0) if event.kind == "collective" and event.payload_bytes > 4]
    # Four matrices, their biases, and the weights and biases of two norms.
    matrices, biases = 12 * width**2, (3 + 1 + 4 + 1) * width
    block = matrices + biases + 4 * width
    # The forward that is computed again needs all but the last bias; a backward needs matrices and the weights of norms.
    backward = block - width if again else matrices + 2 * width

    # The rows of the vocabulary are cut, and padded for that; all else divides.
    embedding, positions = -(-20 // n) * n * width, 8 * width
    gathers = [embedding + positions, *layers * [block], embedding + 2 * width, embedding + width, *layers * [backward]]
    sums = [embedding + 2 * width, *layers * [block], embedding + positions]
    gathered, summed = (
        [event.payload_bytes for event in calls if event.name == kind] for kind in ("all_gather", "reduce_scatter"))
    assert gathered == microbatches * [2 * each for each in gathers]
    assert summed == microbatches * [4 * each for each in sums]
    assert len(calls) == microbatches * (3 * layers + 5)
