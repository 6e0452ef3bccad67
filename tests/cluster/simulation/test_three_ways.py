"""One program, three ways: models under strategies, as plain NumPy, interpreted, executed and simulated.

The numbers are those of the models' own NumPy functions, called with arrays, and the slopes of these: found by complex
steps, which take no difference (Squire and Trapp, *Using Complex Variables to Estimate Derivatives of Real Functions*,
1998), so they owe nothing to the programs.  What is executed and what is simulated agree on every collective and
message, on memory to the byte, and on the time of every event.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from functools import cache
from unittest import mock

import numpy as np
import pytest
from numpy.testing import assert_allclose

from parallelism import Hardware, Mesh, Pipeline, TensorSharding, ir, models
from parallelism.execution import Executable, PipelinedProgram
from parallelism.kernels import dropout_mask
from parallelism.layouts import annotate, localize, partition, propagate
from parallelism.models import (
    TransformerSpec,
    block_parts,
    convolutions,
    experts,
    forward,
    layers,
    perceptron,
    plain_gpt,
    spec,
)
from parallelism.simulation import PipelinedStep, equal_devices, simulate
from parallelism.trace import UndeclaredComputeWarning
from parallelism.transforms import Adam, train_step

S = TensorSharding
B = ir.symbol("B")
ROWS = 6
MODELS = {
    "mlp": lambda: models.mlp((5, 7, 6, 3), B),
    "convolutional": lambda: models.convolutional((6, 5, 2), (3, 4), 5, B),
    "gpt": lambda: models.gpt(vocabulary=11, width=8, heads=4, layers=2, sequence=5, batch=B),
    "mixture": lambda: models.mixture(6, 5, 4, 2, 3, B, 7),
    "transformer": lambda: TransformerSpec(
        layers=2, width=8, heads=4, vocabulary=11, sequence=5, attention_dropout=0.25, hidden_dropout=0.5,
        fused_attention=False, dtype="f64").function(B),
    "llama": lambda: TransformerSpec(
        layers=2, width=16, heads=4, key_value_heads=2, feed_forward=6, vocabulary=10, sequence=5, norm="rms",
        activation="swiglu", positions="rotary", biases=False, tied=False, attention_dropout=0.25, dtype="f64",
    ).function(B),
}


MODULES = (perceptron, convolutions, plain_gpt, experts, spec)
APPLYING = (plain_gpt, experts, layers, forward, block_parts)


# -- in plain NumPy ----------------------------------------------------------------------------------------------------


def _softmax(x, axis):
    powers = np.exp(x - np.max(x.real, axis=axis, keepdims=True))
    return powers / np.sum(powers, axis=axis, keepdims=True)


def _layer_norm(x, weight, bias, epsilon):
    centred = x - np.mean(x, axis=-1, keepdims=True)
    return centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + epsilon) * weight + bias


def _attention_weights(scores, scale, mask, starts):
    places = np.arange(scores.shape[-1])
    return _softmax(np.where(places <= places[:scores.shape[-2], None], scores * scale, -np.inf), -1)


def _dropout(x, step, rate, seed, whole, starts):
    kept = dropout_mask(rate, seed, int(step), whole)
    return x * kept / (1 - rate), kept


def _attention(q, k, v, step=0, *, scale, mask, rate, seed, whole, starts):
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    weights = _attention_weights(np.einsum("bqhd,bkhd->bhqk", q, k), scale, mask, starts)
    weights, _ = _dropout(weights, step, rate, seed, weights.shape, starts)
    return np.einsum("bhqk,bkhd->bqhd", weights, v), None


def _rotary(x, base, inverse, starts):
    angles = np.arange(x.shape[1])[:, None, None] * base ** (-np.arange(0, x.shape[3], 2) / x.shape[3])
    a, b = x[..., ::2], x[..., 1::2]
    turned = a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)
    return np.stack(turned, axis=-1).reshape(x.shape)


PLAIN = {
    "attention": _attention, "attention_weights": _attention_weights, "dropout": _dropout, "rotary": _rotary,
    "take": np.take, "swiglu": lambda gate, x: gate / (1 + np.exp(-gate)) * x,
    "rms_norm": lambda x, weight, epsilon: x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight,
    "softmax": _softmax, "layer_norm": _layer_norm, "relu": lambda x: np.where(x.real > 0, x, 0),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x * x * x))),
    "exponential_sums": lambda logits, largest: np.sum(np.exp(logits - largest[..., None]), axis=-1),
    "cross_entropy": lambda logits, classes, largest, sums, rows, first, whole: np.sum(
        np.log(sums) + largest - np.take_along_axis(logits, classes[..., None], -1)[..., 0]) / rows,
    "iota": lambda dim, shape, starts, dtype: np.indices(shape)[dim] + starts[dim],
    "one_hot": lambda places, extent, dtype: np.eye(extent, dtype=dtype)[np.minimum(places, extent - 1)] * (
        places < extent)[..., None],
}


def in_plain_numpy(make):
    """The function that the model that ``make`` makes is recorded from, on arrays."""
    with ExitStack() as patches:
        for module in MODULES:
            patches.enter_context(mock.patch.object(module, "record", lambda function, *_, name: function))
        loss = make()

    def plain(*arguments):
        with ExitStack() as patches:
            for module in APPLYING:
                patches.enter_context(mock.patch.object(
                    module, "apply", lambda kind, *operands, **options: PLAIN[kind](*operands, **options)))
            return loss(*arguments)

    return plain


def arrays_of(function):
    rng = np.random.default_rng(0)
    return {
        value.name: rng.normal(size=value.type.shape) if value.type.dtype.kind == "f"
        else rng.integers(0, 5, value.type.shape) for value in function.inputs
    }


def weights_of(function):
    return [value.name for value in function.inputs if value.name.startswith("p.")]


@cache
def reference(model):
    """Arrays, and what is wanted of them: the loss and the gradients, found by the interpreter."""
    function = MODELS[model]().specialize(B=ROWS)
    arrays = arrays_of(function)
    return arrays, ir.interpret(ir.gradient(function, weights_of(function), keep_outputs=True), arrays).outputs


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", MODELS)
def test_what_is_interpreted_is_what_plain_numpy_gives(model):
    assert_as_in_plain_numpy(MODELS[model], *reference(model))


def assert_as_in_plain_numpy(make, arrays, interpreted):
    """The loss, and the slope of each gradient in one direction."""
    loss, (value, *gradients) = in_plain_numpy(make), interpreted
    weights = {name.removeprefix("p."): array for name, array in arrays.items() if name.startswith("p.")}
    batch = [array for name, array in arrays.items() if not name.startswith("p.")]
    assert_allclose(value, loss(weights, *batch), rtol=1e-10)
    rng = np.random.default_rng(1)
    for name, gradient in zip(weights, gradients, strict=True):
        along = rng.normal(size=gradient.shape)
        slope = np.imag(loss(weights | {name: weights[name] + 1e-100j * along}, *batch)) / 1e-100
        assert_allclose(np.sum(gradient * along), slope, rtol=1e-10, atol=1e-13)


def adam(p, grads, m, v):
    """A step of the optimizer, in NumPy."""
    m = {name: 0.9 * m[name] + 0.1 * grads[name] for name in p}
    v = {name: 0.99 * v[name] + 0.01 * grads[name] ** 2 for name in p}
    return {name: p[name] - 0.02 * m[name] / (np.sqrt(np.abs(v[name])) + 1e-8) for name in p}, m, v


def with_adam(gradient):
    """A loss and its gradients, and behind them the optimizer: what goes in and comes out besides is its state."""
    weights = weights_of(gradient)
    types = {value.name[2:]: value.type for value in gradient.inputs if value.name in weights}
    update = ir.record(adam, types, types, types, types)
    made = ir.Builder()
    made.copy(gradient)
    known = {value.name: value for value in gradient.inputs}
    known |= {f"grads.{name}": value for name, value in zip(types, gradient.outputs[1:], strict=True)}
    values = {value: known.get(value.name) or made.input(value.name, value.type) for value in update.inputs}
    for op in update.ops:
        found = made.emit(op.kind, [values[value] for value in op.inputs], dict(op.attributes))
        values.update(zip(op.outputs, found, strict=True))
    return made.function("step", [gradient.outputs[0], *(values[value] for value in update.outputs)])


# -- strategies --------------------------------------------------------------------------------------------------------


LANGUAGE = ("gpt", "transformer", "llama")


def data(model, axes="dp"):
    """The batch, over the replicas."""
    names = ("tokens", "targets") if model in LANGUAGE else ("x", "targets")
    return {name: S(axes, ...) for name in names}


TENSOR = {
    "mlp": {"p.w0": S(None, "tp"), "p.b0": S("tp"), "p.w1": S("tp", None), "p.w2": S(None, "tp")},
    "convolutional": {"p.w0": S(None, None, None, "tp"), "p.w1": S(None, None, "tp", None), "p.head": S(None, "tp")},
    "gpt": {f"p.{i}.{name}": layout for i in range(2) for name, layout in {
        "qkv": S(None, "tp"), "out": S("tp", None), "up": S(None, "tp"), "down": S("tp", None)}.items()},
    "transformer": {f"p.{i}.{name}": layout for i in range(2) for name, layout in {
        "qkv": S(None, "tp"), "qkv_bias": S("tp"), "out": S("tp", None), "up": S(None, "tp"), "up_bias": S("tp"),
        "down": S("tp", None)}.items()} | {"p.tokens": S("tp", None)},
    "llama": {f"p.{i}.{name}": layout for i in range(2) for name, layout in {
        "qkv": S(None, "tp"), "out": S("tp", None), "gate": S(None, "tp"), "up": S(None, "tp"),
        "down": S("tp", None)}.items()} | {"p.tokens": S("tp", None), "p.head": S("tp", None)},
    "mixture": {"p.up": S(None, None, "tp"), "p.down": S(None, "tp", None)},
}
"""Columns, then rows, as in Megatron."""
VOCABULARY = TENSOR["gpt"] | {"p.tokens": S("tp", None)}
CONTEXT = {
    "mlp": {"x": S(None, "cp")},
    "convolutional": {"x": S(None, "cp", None, None)},
    **{model: {"tokens": S(None, "cp"), "targets": S(None, "cp")} | (
        {"p.positions": S("cp", None)} if model != "llama" else {}) for model in LANGUAGE},
    "mixture": {"x": S(None, "cp", None), "targets": S(None, "cp", None)},
}
"""The dim of the batch's arrays that is not the rows."""
EXPERTS = {"p.up": S("ep", None, None), "p.down": S("ep", None, None)}


def sequence(function, model="gpt"):
    """Between the products of the blocks activations lie by rows of a sequence, inside by columns."""
    found = {}
    for op in function.ops:
        if op.kind == "matmul":
            inside = op.inputs[1].name.endswith(("out", "down"))
            found[op.inputs[0].name] = S(None, None, "tp") if inside else S(None, "tp", None)
            found[op.outputs[0].name] = S(None, "tp", None) if inside else S(None, None, "tp")
    return TENSOR[model] | found


def further(layout, axis, ndim):
    """A layout whose outermost dim is split over one more axis."""
    first, *others = layout.over(ndim).dims if layout is not None else [None] * ndim
    return S((*(first.axes if first is not None else ()), axis), *others)


def strategies():
    """Model, name, mesh, layouts, ZeRO's stage."""
    for model in MODELS:
        yield model, "unsharded", Mesh(dp=1), {}, 0
        for n in (2, 3, 8):
            yield model, "dp", Mesh(dp=n), data(model), 0
        for n in (2, 3):
            yield model, "tp", Mesh(tp=n), TENSOR[model], 0
        for n in (2, 3):
            yield model, "context", Mesh(cp=n), CONTEXT[model], 0
        for n, m in ((2, 2), (2, 4)):
            yield model, "dp x tp", Mesh(dp=n, tp=m), data(model) | TENSOR[model], 0
        yield model, "dp x tp, inner dp", Mesh(tp=2, dp=3), data(model) | TENSOR[model], 0
        yield model, "context x tp", Mesh(cp=2, tp=2), CONTEXT[model] | TENSOR[model], 0
        for stage, sizes in ((1, (3,)), (2, (2, 3)), (3, (3, 8))):
            for n in sizes:
                yield model, f"zero {stage}", Mesh(dp=n), data(model), stage
            yield model, f"zero {stage} x tp", Mesh(dp=2, tp=2), data(model) | TENSOR[model], stage
    for n in (2, 3, 4):
        yield "gpt", "sequence", Mesh(tp=n), sequence, 0
    for model in ("transformer", "llama"):
        for n, m in ((1, 2), (2, 2), (2, 4)):
            yield (model, "dp x sequence", Mesh(dp=n, tp=m),
                   lambda f, model=model: data(model) | sequence(f, model), 0)
    yield "gpt", "dp x sequence", Mesh(dp=2, tp=4), lambda f: data("gpt") | sequence(f), 0
    yield "gpt", "zero 3 x sequence", Mesh(dp=2, tp=2), lambda f: data("gpt") | sequence(f), 3
    for n in (2, 3):
        yield "gpt", "vocabulary", Mesh(tp=n), VOCABULARY, 0
    yield "gpt", "dp x vocabulary", Mesh(dp=3, tp=2), data("gpt") | VOCABULARY, 0
    for n, m in ((2, 2), (2, 3)):
        yield "gpt", "dp x context", Mesh(dp=n, cp=m), CONTEXT["gpt"] | dict.fromkeys(data("gpt"), S("dp", "cp")), 0
    yield ("gpt", "dp x context x tp", Mesh(dp=2, cp=2, tp=2),
           CONTEXT["gpt"] | TENSOR["gpt"] | dict.fromkeys(data("gpt"), S("dp", "cp")), 0)
    for n in (2, 3, 4, 8):
        yield "mixture", "experts", Mesh(ep=n), data("mixture", "ep") | EXPERTS, 0
    yield "mixture", "dp x experts", Mesh(dp=2, ep=2), data("mixture", ("dp", "ep")) | EXPERTS, 0
    yield ("mixture", "experts x tp", Mesh(ep=2, tp=2),
           data("mixture", "ep") | {"p.up": S("ep", None, "tp"), "p.down": S("ep", "tp", None)}, 0)
    yield "mixture", "zero 3 x experts", Mesh(dp=2, ep=2), data("mixture", ("dp", "ep")) | EXPERTS, 3


def program_of(model, layouts, stage):
    """The loss and its gradients, or with ZeRO a whole step, with the layouts of a strategy; and its arrays and what is
    wanted of them."""
    loss = MODELS[model]().specialize(B=ROWS)
    weights = weights_of(loss)
    given = layouts(loss) if callable(layouts) else layouts
    arrays, wanted = reference(model)
    if not stage:
        return ir.gradient(annotate(loss, given), weights, keep_outputs=True), arrays, wanted
    gradient = ir.gradient(annotate(loss, given), weights, keep_outputs=True)
    step = with_adam(gradient)
    count = len(weights)
    new, m, v = (step.outputs[1 + i * count:1 + (i + 1) * count] for i in range(3))
    types = {value.name: value.type for value in loss.inputs}
    found = {}
    for i, name in enumerate(weights):
        whole = given.get(name) or S.replicated(types[name].ndim)
        apart = further(whole, "dp", types[name].ndim)
        found |= dict.fromkeys((f"m.{name[2:]}", f"v.{name[2:]}", m[i].name, v[i].name), apart)
        found[gradient.outputs[1 + i].name] = whole if stage == 1 else apart
        found[name] = found[new[i].name] = apart if stage == 3 else whole
    rng = np.random.default_rng(2)
    state = [{name[2:]: rng.random(types[name].shape) for name in weights} for _ in range(2)]
    for of, each in zip("mv", state, strict=True):
        arrays = arrays | {f"{of}.{name}": array for name, array in each.items()}
    after = adam(*({name[2:]: array for name, array in zip(weights, of, strict=True)} for of in (
        [arrays[name] for name in weights], wanted[1:])), *state)
    return annotate(step, found), arrays, [wanted[0], *(array for each in after for array in each.values())]


# -- what must agree ---------------------------------------------------------------------------------------------------


def executed(cluster, program, arrays):
    result, trace = run_on(cluster, program, arrays)
    if cluster.backend == "mpi":
        assert_same_on_processes(cluster.mesh, program, arrays, result, trace)
    return result, trace


def run_on(cluster, program, arrays):
    done = cluster.run(program, arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UndeclaredComputeWarning)
        return done.result, done.trace


def bits(result):
    """Results with each array as its dtype, its shape and its bytes."""
    if isinstance(result, dict):
        return {name: bits(each) for name, each in result.items()}
    if isinstance(result, (list, tuple)):
        return [bits(each) for each in result]
    array = np.asarray(result)
    return array.dtype, array.shape, array.tobytes()


def assert_same_on_processes(mesh, program, arrays, result, trace):
    """Two more ways: on the ranks of an MPI job as on processes, every bit, byte, peak and time."""
    from on_mpi import on_processes

    there, recorded = run_on(on_processes(mesh, hardware="dgx-h100", compute="modelled"), program, arrays)
    assert bits(result) == bits(there)
    one, other = by_rank(trace), by_rank(recorded)
    for rank in other:
        assert said(one[rank]) == said(other[rank])
        assert [(e.kind, e.name, e.start_seconds, e.duration_seconds) for e in one[rank]] == [
            (e.kind, e.name, e.start_seconds, e.duration_seconds) for e in other[rank]]
    for category in (None, *{e.name for e in recorded if e.kind == "memory"}):
        assert trace.peaks(category) == recorded.peaks(category)
    assert trace.makespan_seconds == recorded.makespan_seconds


def by_rank(trace):
    """The events of devices, without what goes to and from the host."""
    found = trace.by_rank()
    return {rank: [e for e in found[rank] if e.kind not in ("h2d", "d2h") and e.parent is None] for rank in trace.ranks}


def said(events):
    return [(e.kind, e.name, e.axes, e.group, e.peer, e.tag, e.bytes_sent, e.bytes_received, e.messages,
             e.payload_bytes, e.root, e.pairs)
            for e in events if e.kind in ("collective", "send", "recv")]


def assert_same_events(found, wanted):
    """Of one device, or of one that stands for it."""
    assert [(e.kind, e.name) for e in found] == [(e.kind, e.name) for e in wanted]
    times = [np.array([(e.start_seconds, e.duration_seconds) for e in events]) for events in (found, wanted)]
    assert_allclose(*times, rtol=1e-9, atol=1e-9 * float(times[1].max(initial=0)))


def assert_agree(simulated, trace):
    """Collectives and messages, memory in every category, and times."""
    there, here = by_rank(simulated), by_rank(trace)
    assert there.keys() == here.keys() == {*range(trace.size)}
    for rank in here:
        assert said(there[rank]) == said(here[rank])
        assert_same_events(there[rank], here[rank])
    for category in (None, *{e.name for e in trace if e.kind == "memory"}):
        assert simulated.peaks(category) == trace.peaks(category)
    assert trace.makespan_seconds == pytest.approx(simulated.makespan_seconds, rel=1e-9)


def assert_folds(executable, simulated, hardware, **options):
    """Those that stand for others tell what each of these would."""
    folded = simulate(executable, hardware, fold=True, **options)
    equal = equal_devices(executable, hardware, **{k: v for k, v in options.items() if k == "link_sharing"})
    there, here = by_rank(folded), by_rank(simulated)
    assert set(there) == set(equal.first.tolist())
    for rank, events in here.items():
        stands = int(equal.first[equal.set_of[rank]])
        assert_same_events(there[stands], events)
        assert folded.peak_bytes(stands) == simulated.peak_bytes(rank)
        if stands == rank:
            assert said(there[stands]) == said(events)


def assert_numbers(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert_allclose(one, other, rtol=1e-10, atol=1e-10 * np.abs(other).max(initial=0))


def assert_three_ways(cluster, function, arrays, wanted, donate=()):
    executable = Executable(localize(propagate(function, cluster.mesh), cluster.mesh), donate=donate)
    assert_numbers(ir.interpret(executable.programs.function, arrays).outputs, wanted)
    result, trace = executed(cluster, executable, arrays)
    assert_numbers(result, wanted)
    simulated = simulate(executable, "dgx-h100")
    assert_agree(simulated, trace)
    assert_folds(executable, simulated, "dgx-h100")
    if cluster.mesh.size == 1:
        alone = ir.interpret(executable.programs.program(0), arrays, donate=donate)
        assert simulated.peak_bytes(0) == alone.peak_bytes
    return executable, trace


CASES = [*strategies()]
IDS = [f"{model} {name} {'x'.join(map(str, mesh.shape.values()))}" for model, name, mesh, _, _ in CASES]


@pytest.mark.takes_seconds
@pytest.mark.sampled(200)
@pytest.mark.parametrize(("model", "name", "mesh", "layouts", "stage"), CASES, ids=IDS)
def test_a_strategy_is_one_program_three_ways(cluster_of, model, name, mesh, layouts, stage):
    cluster = cluster_of(mesh, "thread", hardware="dgx-h100", compute="modelled")
    assert_three_ways(cluster, *program_of(model, layouts, stage))


@pytest.mark.takes_seconds
@pytest.mark.parametrize("name", ["mlp tp 2", pytest.param("gpt dp x tp 2x2", marks=pytest.mark.slow),
                                  pytest.param("mixture experts 3", marks=pytest.mark.slow),
                                  pytest.param("mlp zero 2 3", marks=pytest.mark.slow)])
def test_on_processes_it_is_the_same(cluster_of, name):
    model, _, mesh, layouts, stage = CASES[IDS.index(name)]
    cluster = cluster_of(mesh, hardware="dgx-h100", compute="modelled")
    assert_three_ways(cluster, *program_of(model, layouts, stage))


# -- pipelines ---------------------------------------------------------------------------------------------------------

ZERO = {"convolutional": ("p.w0", "p.w1"), "gpt": ("p.tokens", "p.0.qkv", "p.1.up"), "mlp": ("p.w0", "p.b0", "p.w2")}


def zero_inside(model):
    """Weights over an axis inside a stage that also has the rows of a microbatch."""
    types = {value.name: value.type for value in MODELS[model]().inputs}
    return data(model, "zero") | {name: further(None, "zero", types[name].ndim) for name in ZERO[model]}


def pipelines():
    """Model, mesh, schedule, chunks, microbatches, layouts inside a stage, further options."""
    for model in MODELS:
        for schedule, chunks in (("1f1b", 1), ("interleaved_1f1b", 2), ("dual_pipe_v", 2)):
            yield model, Mesh(pp=2), schedule, chunks, 4, {}, {}
        yield model, Mesh(pp=3), "1f1b", 1, 5, {}, {"recompute": True}
        yield model, Mesh(dp=3, pp=2), "gpipe", 1, 2, {}, {}
        yield model, Mesh(pp=2, tp=3), "zero_bubble_h1", 1, 2, TENSOR[model], {}
        yield model, Mesh(tp=2, pp=2, dp=2), "zero_bubble_v", 2, 2, TENSOR[model], {"recompute": [1]}
        yield model, Mesh(dp=2, pp=2, tp=2), "1f1b", 1, 3, TENSOR[model], {}
    for model in ZERO:
        yield model, Mesh(pp=2, zero=2), "1f1b", 1, 2, zero_inside(model), {}
        yield model, Mesh(pp=2, zero=3), "zero_bubble_h1", 1, 2, zero_inside(model), {}
        yield model, Mesh(pp=2, zero=2, tp=2), "gpipe", 1, 2, TENSOR[model] | zero_inside(model), {}
    yield "gpt", Mesh(pp=2, tp=2), "1f1b", 1, 2, VOCABULARY, {}
    yield "gpt", Mesh(pp=2, cp=2), "1f1b", 1, 3, CONTEXT["gpt"], {}
    yield "gpt", Mesh(pp=2, tp=2), "1f1b", 1, 3, sequence, {}
    yield "mixture", Mesh(pp=2, ep=2), "1f1b", 1, 2, data("mixture", "ep") | EXPERTS, {}
    yield "mixture", Mesh(pp=2, ep=3), "gpipe", 1, 2, data("mixture", "ep") | EXPERTS, {}


PIPELINES = [*pipelines()]
PIPELINE_IDS = [
    f"{model} {schedule} {'x'.join(f'{n}{axis}' for axis, n in mesh.shape.items())}"
    f"{' recomputed' * ('recompute' in options)} {i}"
    for i, (model, mesh, schedule, _, _, _, options) in enumerate(PIPELINES)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "schedule", "chunks", "microbatches", "layouts", "options"), PIPELINES, ids=PIPELINE_IDS)
def test_a_pipeline_is_one_program_three_ways(
    cluster_of, model, mesh, schedule, chunks, microbatches, layouts, options
):
    stages = mesh.shape["pp"] * chunks
    function = MODELS[model]()
    function = annotate(function, layouts(function) if callable(layouts) else layouts)
    inside = {axis: n for axis, n in mesh.shape.items() if axis not in ("pp", "dp")}
    program = PipelinedProgram(
        partition(function, stages, **options), Pipeline(stages, microbatches, schedule, chunks),
        Mesh(**inside) if inside else None)
    arrays, wanted = reference(model)
    cluster = cluster_of(mesh, "thread", hardware="dgx-h100", compute="modelled")
    result, trace = executed(cluster, program, arrays)
    assert list(result.gradients) == weights_of(function)
    assert_numbers([result.loss, *result.gradients.values()], wanted)
    step = PipelinedStep(program, mesh, ROWS)
    simulated = simulate(step, "dgx-h100")
    assert_agree(simulated, trace)
    folded, equal = simulate(step, "dgx-h100", fold=True), equal_devices(step, "dgx-h100")
    assert folded.makespan_seconds == pytest.approx(simulated.makespan_seconds, rel=1e-9)
    here, there = by_rank(simulated), by_rank(folded)
    for rank in range(mesh.size):       # what a stage does for a microbatch is one event there
        stands = int(equal.first[equal.set_of[rank]])
        assert folded.peak_bytes(stands) == simulated.peak_bytes(rank)
        whole, ours = ([e for e in of[r] if e.kind in ("send", "recv")]
                       for of, r in ((here, rank), (there, stands)))
        assert [(e.kind, e.bytes_sent, e.bytes_received) for e in ours] == [
            (e.kind, e.bytes_sent, e.bytes_received) for e in whole]
        assert_same_events(ours, whole)


# -- and any others ----------------------------------------------------------------------------------------------------

HARDWARE = {
    "another": Hardware.preset("dgx-a100"), "torus": Hardware.preset("tpu-v4:2x2x2"),
    "slow": Hardware.preset("pcie-v100"), "ethernet": Hardware.preset("ethernet-cpu:8"),
    "straggler": Hardware.preset("dgx-h100").slow(rank=1, factor=3),
    "fault": Hardware.preset("dgx-h100").fault(source=0, target=1, bandwidth_factor=0.5),
}
MESHES = [
    Mesh(x=2), Mesh(y=3), Mesh(one=1), Mesh(x=2, one=1), Mesh(y=2, x=2), Mesh(x=2, y=3), Mesh(one=1, y=4, x=2),
    Mesh(a=2, b=2, c=2), Mesh(x=7),
]


def some_layout(rng, value, mesh):
    """Axes dealt to dims in any order, several on one, or left out; terms of a sum where there are floats."""
    dims, partial = [[] for _ in value.type.shape], []
    for axis in rng.permutation(mesh.axes).tolist():
        place = int(rng.integers(-2, len(dims)))
        if place >= 0:
            dims[place].append(axis)
        elif place == -2 and value.type.dtype.kind == "f" and rng.random() < 0.3:
            partial.append(axis)
    return S(*dims, partial=partial)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(18))
def test_any_layouts_are_one_program_three_ways_on_any_hardware(cluster_of, seed):
    rng = np.random.default_rng(seed)
    model, mesh = [*MODELS][seed % len(MODELS)], MESHES[seed % len(MESHES)]
    rows = int(rng.integers(1, 6))
    loss = MODELS[model]().specialize(B=rows)
    function = ir.gradient(loss, weights_of(loss), keep_outputs=True)
    share = rng.choice([0.05, 0.3, 0.8])
    given = {value.name: some_layout(rng, value, mesh) for value in function.values if rng.random() < share}
    arrays = arrays_of(loss)
    cluster = cluster_of(mesh, "thread", hardware="dgx-h100", compute="modelled")
    executable, trace = assert_three_ways(
        cluster, annotate(function, given), arrays, ir.interpret(function, arrays).outputs)
    name = [*HARDWARE][seed % len(HARDWARE)]
    there = {"priced_dtype": "float32" if name in ("slow", "ethernet") else "bfloat16", "link_sharing": bool(seed % 2)}
    simulated = simulate(executable, HARDWARE[name], **there)
    assert_agree(simulated, trace.on(HARDWARE[name], **there))
    if name in ("another", "straggler") or not there["link_sharing"]:
        assert_folds(executable, simulated, HARDWARE[name], **there)


def some_spec(rng):
    """A Transformer of any kind: norms, activations, positions, attention, dropout, biases, tables."""
    def pick(*choices):
        return choices[int(rng.integers(len(choices)))]

    groups, each = pick(1, 2, 3), pick(1, 2)
    return TransformerSpec(
        layers=pick(1, 2), width=2 * pick(1, 2) * groups * each, heads=groups * each, key_value_heads=groups,
        feed_forward=pick(None, 5, 8), vocabulary=pick(6, 7, 8), sequence=pick(1, 3, 4),
        activation=pick("gelu", "relu", "swiglu"), norm=pick("layer", "rms"), positions=pick("learned", "rotary"),
        biases=pick(False, True), tied=pick(False, True), attention_dropout=pick(0.0, 0.25),
        hidden_dropout=pick(0.0, 0.25), fused_attention=pick(False, True), dtype="f64", epsilon=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_any_donated_training_step_is_one_program_three_ways(cluster_of, seed):
    """Of any Transformer, on 1 to 8 devices, in any layouts; the next state lies in the memory of the last."""
    rng = np.random.default_rng(seed)
    spec, rows, mesh = some_spec(rng), int(rng.integers(1, 5)), STEP_MESHES[seed % len(STEP_MESHES)]
    loss = spec.function(rows)
    arrays = arrays_of(loss)
    gradient = ir.gradient(loss, weights_of(loss), keep_outputs=True)
    assert_as_in_plain_numpy(lambda: spec.function(rows), arrays, ir.interpret(gradient, arrays).outputs)
    step = train_step(loss, Adam(0.02))
    arrays |= {v.name: rng.random(v.type.shape) + 0.1 for v in step.inputs if v.name.startswith(("mean.", "square."))}
    arrays["updates"] = np.asarray(3)
    share = rng.choice([0.0, 0.1, 0.4])
    given = {value.name: some_layout(rng, value, mesh) for value in step.values if rng.random() < share}
    for value in step.inputs:
        if value.name.startswith(("p.", "mean.", "square.", "updates")):
            layout = some_layout(rng, value, mesh)
            given[value.name] = given[f"next.{value.name}"] = S(*layout.dims)
    _, trace = assert_three_ways(
        cluster_of(mesh, "thread", hardware="dgx-h100", compute="modelled"), annotate(step, given), arrays,
        ir.interpret(step, arrays).outputs, ("p", "mean", "square", "updates"))
    assert {*trace.peaks("outputs").values()} == {8}        # the loss


STEP_MESHES = [
    Mesh(one=1), Mesh(x=2), Mesh(y=3), Mesh(x=2, y=2), Mesh(x=5), Mesh(x=2, y=3), Mesh(x=7), Mesh(a=2, b=2, c=2)]
