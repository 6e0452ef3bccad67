"""A program cut into stages: where, what each stage does, and that together they do what the whole does."""

from __future__ import annotations

import pickle
from dataclasses import replace
from importlib import import_module
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from parallelism import Mesh, TensorSharding, ir, models
from parallelism.layouts import annotate, propagate
from parallelism.layouts.stages import Stages, gradient_layout, rows_of
from parallelism.layouts.stages.batches import checked, dealt
from parallelism.layouts.stages.cuts import balanced, begun_by
from parallelism.layouts.stages.laid_out_stages import laid_out_stages
from parallelism.layouts.stages.messages import packed, unpacked
from parallelism.layouts.stages.microbatches import microbatched
from parallelism.layouts.stages.partition import partition

B, S = ir.symbols("B S")


def tensor(*shape, dtype="f64"):
    return ir.TensorType(dtype, shape)


def chain(x, targets, w):
    """Integers in, integers out; ``a`` is used again two layers later."""
    with ir.region("first"):
        a = np.maximum(x @ w["0"], 0)
    with ir.region("middle.up"):
        b = np.maximum(a @ w["1"], 0)
    with ir.region("middle.down"):
        c = b @ w["2"]
    with ir.region("last"):
        return np.sum((c + a - targets) ** 2)


CHAIN = ir.record(chain, tensor(B, 3), tensor(B, 4), {"0": tensor(3, 4), "1": tensor(4, 5), "2": tensor(5, 4)})
MODELS = {
    "chain": (CHAIN, {}),
    "mlp": (models.mlp((5, 7, 6, 4, 3), B), {}),
    "convolutional": (models.convolutional((8, 7, 2), (3, 4), 5, B), {}),
    "gpt": (models.gpt(11, 8, 2, 2, S, B), {"S": 3}),
    "mixture": (models.mixture(6, 5, 4, 2, 3, B, S), {"S": 7}),
}


def arrays(function, seed=0, **numbers):
    """Small integers for inputs of these numbers."""
    rng = np.random.default_rng(seed)
    return {
        v.name: rng.integers(-2, 3, v.type.shape).astype(v.type.dtype) if v.type.dtype.kind == "f"
        else rng.integers(0, 5, v.type.shape)
        for v in function.specialize(**numbers).inputs
    }


def weights(function):
    return [v.name for v in function.inputs if "B" not in v.type.symbols and v.type.dtype.kind == "f"]


def run(function, there):
    """What it returns, by name, of values that are there by name."""
    outputs = ir.interpret(function, [there[value.name] for value in function.inputs]).outputs
    return dict(zip((value.name for value in function.outputs), outputs, strict=True)), list(outputs)


def step(stages, inputs, microbatches, *, halves=False):
    """Loss and gradients, by nothing but the functions of the stages."""
    inputs, numbers = checked(stages.function, inputs)
    rows = numbers.pop("B")
    values = {value.name: value for value in stages.specialize(**numbers).function.inputs}
    loss, gradients = 0, {}
    for first, count in dealt(0, rows, microbatches):
        parts = stages.specialize(**numbers, B=count, B_whole=rows, B_first=first).functions
        message, kept = {}, []
        for stage in parts:
            there = {name: inputs[name] for name in stage.weights} | message
            there |= {name: rows_of(inputs[name], values[name].type, "B", first, count) for name in stage.data}
            assert set(message) == set(stage.received)
            there |= run(stage.forward, there)[0]
            kept.append({name: there[name] for name in stage.saved})
            message = {name: there[name] for name in stage.sent}
        loss += sum(message.values())
        message = {name: np.ones_like(message[name]) for name in parts[-1].answered}
        for stage, saved in zip(parts[::-1], kept[::-1], strict=True):
            weights = {name: inputs[name] for name in stage.weights}
            assert set(message) == set(stage.answered)
            there = weights | saved | {f"grad.{name}": array for name, array in message.items()}
            if stage.recompute:
                there |= run(stage.recompute, weights | saved)[0]
            if halves:
                made, found = run(stage.backward_input, there)
                between = {name: (there | made)[name] for name in stage.between}
                found[len(stage.returned):] = run(stage.backward_weights, weights | between)[1]
            else:
                found = run(stage.backward, there)[1]
            message = dict(zip(stage.returned, found, strict=False))
            for name, gradient in zip(stage.trained, found[len(stage.returned):], strict=True):
                gradients[name] = gradients.get(name, 0) + gradient
    return loss, gradients


# -- what the stages do together ---------------------------------------------------------------------------------------


@pytest.mark.slow_for("gpt")
@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("count", "microbatches", "options"), [
    (1, 1, {}), (2, 3, {}), (3, 2, {"recompute": True}), (4, 5, {"recompute": [1, 3]}),
])
def test_stages_make_the_loss_and_the_gradients_of_the_whole(name, count, microbatches, options):
    function, numbers = MODELS[name]
    inputs = arrays(function, B=7, **numbers)
    stages = partition(function, count, sizes={"B": 7, **numbers}, **options)
    wanted = ir.interpret(ir.gradient(function, weights(function), keep_outputs=True), inputs).outputs
    equal = assert_array_equal if name == "chain" else lambda a, b: assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    for halves in (False, True):
        loss, gradients = step(stages, inputs, microbatches, halves=halves)
        equal(loss, wanted[0])
        assert set(gradients) == set(weights(function))
        for weight, gradient in zip(weights(function), wanted[1:], strict=True):
            equal(gradients[weight], gradient)


LAYERS = {
    "+": lambda a, b, w, scale: a + b, "*": lambda a, b, w, scale: a * scale + b, "@": lambda a, b, w, scale: b @ w + a,
    "m": lambda a, b, w, scale: np.maximum(a, b @ w.T),
}


@given(st.data())
def test_any_program_may_be_cut_anywhere(data):
    """Layers that take any earlier values and share weights, cut before any ops, in uneven microbatches."""
    layers = data.draw(st.lists(
        st.tuples(st.sampled_from(sorted(LAYERS)), st.integers(0, 4), st.integers(0, 4), st.integers(0, 1)), min_size=1,
        max_size=6))

    def loss(x, targets, w, scale):
        values = [x, x * scale]
        for kind, i, j, k in layers:
            a, b = values[i % len(values)], values[-1 - j % len(values)]
            values.append(LAYERS[kind](a, b, w[k], scale))
        return np.sum(values[-1] * targets) + np.sum(values[len(values) // 2])

    function = ir.record(loss, tensor(B, 2), tensor(B, 2), [tensor(2, 2), tensor(2, 2)], tensor(2))
    chain = [op.outputs[0].name for op in partition(function, 1).functions[0].forward.ops if op.inputs]
    chain = [name for name in chain if "B" in next(v for v in function.values if v.name == name).type.symbols][1:]
    begin = sorted(data.draw(st.sets(st.sampled_from(chain), max_size=4)), key=chain.index) if chain else []
    again = data.draw(st.sets(st.integers(0, len(begin))))
    inputs, names = arrays(function, data.draw(st.integers(0, 9)), B=5), ["w.0", "w.1", "scale"]
    stages = partition(function, begin, recompute=again)
    found, gradients = step(stages, inputs, data.draw(st.integers(1, 5)), halves=data.draw(st.booleans()))
    wanted = ir.interpret(ir.gradient(function, names, keep_outputs=True), inputs).outputs
    assert_array_equal(found, wanted[0])
    for name, gradient in zip(names, wanted[1:], strict=True):
        assert_array_equal(gradients.get(name, 0), gradient)      # 0 of what no stage reads


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["chain", "mlp", "convolutional"])
def test_nothing_is_computed_twice_unless_asked_for(name):
    function, _ = MODELS[name]
    whole = ir.gradient(microbatched(function), weights(function), keep_outputs=True)
    numbers = {"B": 5, "B_whole": 9} if "B_whole" in whole.symbols else {"B": 5}
    flops = whole.specialize(**numbers).flops
    for count in (1, 3):
        plain = partition(function, count).specialize(**numbers).functions
        assert sum(f.forward.flops + f.backward.flops for f in plain) == flops
        assert all(f.backward_input.flops + f.backward_weights.flops == f.backward.flops for f in plain)
        again = partition(function, count, recompute=True).specialize(**numbers).functions
        assert all(f.forward.flops >= f.recompute.flops for f in again if f.recompute)
        assert [f.backward for f in again] == [f.backward for f in plain]


def test_a_half_for_the_input_has_no_product_with_a_weights_gradient():
    first, second, third = partition(MODELS["mlp"][0], ["4", "7"]).functions
    assert not first.backward_input.ops and not first.returned
    assert [op["equation"] for op in second.backward_input.ops if op.kind == "einsum"] == ["mn,kn->mk"]
    assert [op["equation"] for op in second.backward_weights.ops if op.kind == "einsum"] == ["mn,mk->kn"]
    assert {op.kind for op in third.backward_weights.ops} == {"einsum", "sum"}


def test_views_and_constants_are_not_kept():
    function, numbers = MODELS["gpt"]
    made = {value.name: op for op in function.ops for value in op.outputs}
    again = set()
    for stage in partition(function, 3, sizes=numbers).functions:
        kept = [made[name] for name in stage.saved if name in made]
        assert kept and not any(op.operator.view or not op.inputs for op in kept)
        again |= {op.kind for op in stage.backward.ops}
    assert {"reshape", "constant"} <= again


def test_a_stage_that_recomputes_keeps_its_inputs_alone():
    plain = partition(CHAIN, ["middle", "last"]).functions[1]
    again = partition(CHAIN, ["middle", "last"], recompute=[1]).functions[1]
    assert plain.recompute is None and set(plain.saved) > set(plain.received)
    assert again.saved == again.received == plain.received
    assert {*again.saved, *(value.name for value in again.recompute.outputs)} == set(plain.saved)
    assert again.forward.outputs == plain.forward.outputs[:len(plain.sent)]


# -- where values go ---------------------------------------------------------------------------------------------------


def test_a_value_that_is_used_later_passes_through_the_stages_between():
    first, up, down, last = partition(CHAIN, ["middle.up", "middle.down", "last"]).functions
    a, = first.sent
    assert up.received == (a,) and up.sent[0] == a and len(up.sent) == 2
    assert down.received == up.sent and down.sent[0] == a and len(down.sent) == 2 and last.received == down.sent
    assert all(f.returned == f.received for f in (up, down, last)) and up.answered == up.sent
    assert a not in {value.name for op in down.forward.ops for value in op.inputs}
    # its gradients are added up where it branches off
    assert [op.kind for op in down.backward.ops] == ["einsum", "einsum"]
    assert "add" in [op.kind for op in up.backward.ops]
    assert first.data == ("x",) and last.data == ("targets",) and not up.data and not down.data


def test_what_depends_on_no_data_is_made_where_it_is_used():
    def loss(x, w, v):
        scale = np.where(w > 0, w, 0.0)
        return np.sum(((x * scale) @ v) * scale)

    function = ir.record(loss, tensor(B, 3), tensor(3), tensor(3, 3))
    product = next(number for number, op in enumerate(function.ops) if op.kind == "matmul")
    stages = partition(function, [op.outputs[0].name for op in function.ops[product:product + 2]])
    assert [f.weights for f in stages.functions] == [("w",), ("v",), ("w",)] and stages.holders["w"] == (0, 2)
    assert [[op.kind for op in f.forward.ops].count("where") for f in stages.functions] == [1, 0, 1]
    assert all(len(f.sent) == 1 for f in stages.functions)
    inputs = arrays(function, B=4)
    loss, gradients = step(stages, inputs, 3)
    wanted = ir.interpret(ir.gradient(function, ["w", "v"], keep_outputs=True), inputs).outputs
    for found, array in zip([loss, gradients["w"], gradients["v"]], wanted, strict=True):
        assert_array_equal(found, array)


def test_integers_are_sent_and_no_gradient_of_them_comes_back():
    def loss(ids, table, w):
        kept = ids * 2
        return np.sum((table[ids] @ w) * kept[:, None])

    function = ir.record(loss, tensor(B, dtype="i64"), tensor(9, 3), tensor(3, 2))
    ops = [op.outputs[0].name for op in function.ops if op.kind in ("matmul",)]
    first, second = partition(function, ops).functions
    assert len(second.received) == 2 and len(second.returned) == 1
    inputs = arrays(function, B=5)
    wanted = ir.interpret(ir.gradient(function, ["table", "w"], keep_outputs=True), inputs).outputs
    loss, gradients = step(partition(function, ops), inputs, 2)
    assert_array_equal(loss, wanted[0])
    assert_array_equal(gradients["table"], wanted[1])
    assert first.trained == ("table",) and second.trained == ("w",)


def test_what_came_by_whole_numbers_has_no_gradient_to_send_back():
    function, _ = MODELS["mixture"]
    router, *_, last = partition(function, ["dispatch", "experts", "combine", "loss"]).functions
    assert router.weights == ("p.router",) and last.data == ("targets",)
    assert 1 <= len(router.answered) < len(router.sent)     # the gates have one, the slots have none


def test_a_tied_weight_has_a_copy_in_each_stage_that_reads_it():
    function, numbers = MODELS["gpt"]
    stages = partition(function, 4, sizes=numbers)
    assert stages.holders["p.tokens"] == (0, 3)
    assert all(len(holders) == 1 for name, holders in stages.holders.items() if name != "p.tokens")


def test_only_what_is_trained_has_a_gradient():
    first, second = partition(CHAIN, ["last"], trained=["w.1"]).functions
    assert first.trained == ("w.1",) and second.trained == ()
    assert len(second.received) == 2 and len(second.returned) == 1      # a is no function of w.1


@given(st.lists(st.tuples(st.sampled_from(["f8", "f4", "i2", "i1", "?"]), st.lists(st.integers(0, 3), max_size=3)),
                max_size=4))
def test_what_is_packed_is_unpacked(types):
    types = sorted((ir.TensorType(np.dtype(d), shape) for d, shape in types), key=lambda t: -t.dtype.itemsize)
    rng = np.random.default_rng(0)
    given = [rng.integers(0, 2, type.shape).astype(type.dtype) for type in types]
    message = packed(given)
    assert message.nbytes == sum(array.nbytes for array in given)
    for array, wanted in zip(unpacked(message, types), given, strict=True):
        assert array.dtype == wanted.dtype
        assert_array_equal(array, wanted)
        assert len(types) == 1 or not np.shares_memory(array, message)      # each can go before the others


def test_a_message_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"a message of tensor<3xf64>, tensor<f32> has 28 bytes, got uint8\[27\]"):
        unpacked(np.zeros(27, np.uint8), [tensor(3), tensor(dtype="f32")])


# -- where it is cut ---------------------------------------------------------------------------------------------------


@given(st.data())
def test_cuts_are_the_best_of_all(data):
    count = data.draw(st.integers(1, 8))
    costs = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    sent = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    stages = data.draw(st.integers(1, count))

    def price(cuts):
        edges = [0, *cuts, count]
        return max(sum(costs[a:b]) for a, b in pairwise(edges)), sum(sent[c] for c in cuts)

    found = balanced(costs, stages, sent)
    assert len(found) == stages - 1 and price(found) == min(map(price, combinations(range(1, count), stages - 1)))


def test_a_program_is_balanced_by_flops_or_by_any_cost():
    function = models.mlp((16, 64, 2, 2, 2), B)
    assert partition(function, 2).functions[0].weights == ("p.w0",)
    by_products = partition(function, 2, cost=lambda op: op.kind == "matmul").functions
    assert {"p.w0", "p.w1"} <= set(by_products[0].weights) and {"p.w2", "p.w3"} <= set(by_products[1].weights)


def test_of_cuts_as_good_the_one_that_sends_least_there_and_back_is_taken():
    def loss(ids, table):
        found = table[ids * 2]
        return np.sum(found * found)

    function = ir.record(loss, tensor(B, dtype="i64"), tensor(9))
    first, second = partition(function, 2, cost=lambda op: 0).functions
    assert [op.kind for op in first.forward.ops if op.inputs] == ["multiply"] and not second.returned


@pytest.mark.parametrize(("names", "told"), [
    (["nowhere"], r"a stage cannot begin with 'nowhere': @chain has no value or region of this name that depends on "
                  r"its data"),
    (["first"], r"the first stage of @chain would be empty: no op precedes 'first'"),
    (["last", "middle"], r"the stage that begins with 'last' of @chain would be empty: no op precedes 'middle'"),
    (["middle", "middle.up"], r"that begins with 'middle' of @chain would be empty: no op precedes 'middle.up'"),
])
def test_names_that_begin_no_stage_are_told(names, told):
    with pytest.raises(ValueError, match=told):
        partition(CHAIN, names)
    assert begun_by(["b", "d"], [{"a"}, {"b"}, {"c"}, {"d"}], "f") == (1, 3)


@pytest.mark.parametrize(("function", "stages", "options", "told"), [
    (CHAIN, 0, {}, r"9 ops can be cut into 1 to 9 stages, got 0"),
    (CHAIN, 10, {}, r"1 to 9 stages, got 10"),
    (CHAIN, 2, {"recompute": [2]}, r"recompute must name stages 0 to 1, got \[2\]"),
    (CHAIN, 2, {"trained": ["x"]}, r"inputs of @chain without rows \(w.0, w.1, w.2\), got x"),
    (CHAIN, 2, {"batch": "N"}, r"@chain has no symbol N for the rows of a batch: its symbols are B"),
    (MODELS["gpt"][0], 2, {}, r"the costs of the ops of @gpt can be compared only with numbers: give sizes for S"),
    (ir.record(lambda x: x * 2, tensor(B)), 1, {}, r"must return one floating-point number first, a loss; @.* tensor<Bxf64>"),
])
def test_what_cannot_be_cut_is_told(function, stages, options, told):
    with pytest.raises(ValueError, match=told):
        partition(function, stages, **options)


def test_a_single_name_is_no_list():
    with pytest.raises(TypeError, match=r"or a list of the names at which stages begin, got 'last'"):
        partition(CHAIN, "last")


def test_stages_are_values():
    stages = partition(CHAIN, 3, recompute=True)
    assert pickle.loads(pickle.dumps(stages)) == stages  # noqa: S301  (our own)
    assert stages == partition(CHAIN, 3, recompute=True)
    assert hash(stages) == hash(partition(CHAIN, 3, recompute=True))
    for functions in stages.functions:
        for function in (functions.forward, functions.backward, functions.backward_input, functions.backward_weights):
            assert ir.parse(str(function)) == function
    with pytest.raises(ValueError, match=r"stage 0 of @chain sends .*, but stage 1 receives"):
        Stages(stages.function, stages.functions[::2], "B")
    with pytest.raises(ValueError, match=r"takes w.0, which its stage does not have"):
        replace(stages.functions[0], weights=())
    specialized = stages.specialize(B=3)
    assert not any(functions.symbols for functions in specialized.functions)
    assert specialized.functions[1].forward == stages.functions[1].forward.specialize(B=3)


# -- microbatches ------------------------------------------------------------------------------------------------------


def of_mean(x, w):
    return np.mean((x @ w) ** 2)


def of_rows(x, w):
    return ir.apply("softmax_cross_entropy", x @ w, np.argmax(x[:, :2], axis=1), rows=x.shape[0])


def of_places(x, w):
    """Knows the numbers of its rows, by counting and by chance."""
    places = ir.apply("iota", dim=0, shape=x.shape, starts=(0, 0), dtype=np.dtype("f8"))
    step = np.where(True, ir.apply("constant", value=3, shape=(), dtype=np.dtype("i8")), 0)
    kept = ir.apply("dropout_mask", step, rate=0.5, seed=1, whole=x.shape, starts=(0, 0), shape=x.shape)
    return np.sum((np.where(kept, x, 0.0 * x) * places) @ w) / x.shape[0]


def of_flat_rows(x, w):
    return np.mean((x @ w).reshape(x.shape[0] * 2) ** 2) * 3 - np.sum(x) / 2


def of_terms(x, w):
    total = 0.0
    for factor in (2, 3):
        total = total + np.mean((x @ w) ** factor)
    return total


def of_weights(x, w):
    """A norm of the weights and a number are added to a sum over the rows, and subtracted from it."""
    return np.sum(w**2) * 0.1 + (np.mean((x @ w) ** 2) - np.sum(w)) - 0.5


def of_rows_inside(x, w):
    """Rows are merged with a dim that stands outside of them, and dealt again; then twice in a row."""
    columns = np.tanh(x.T.reshape(3 * x.shape[0])) * x.T.reshape(3 * x.shape[0])
    merged = np.swapaxes((x @ w).reshape(x.shape[0], 2, 1) * x.reshape(x.shape[0], 1, 3), 0, 2).reshape(3, 2 * x.shape[0], 1)
    return np.sum(columns.reshape(3, x.shape[0]).T @ w) + np.sum(merged.reshape(6 * x.shape[0]) ** 2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("loss", [of_mean, of_rows, of_places, of_flat_rows, of_terms, of_weights, of_rows_inside])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_losses_of_microbatches_add_up_to_that_of_the_batch(loss, parts):
    function = ir.record(loss, tensor(B, 3), tensor(3, 2))
    x, w = arrays(function, B=5).values()
    part = microbatched(function)
    found = 0
    for first, rows in dealt(0, 5, parts):
        numbers = {"B": rows, "B_whole": 5, "B_first": first}
        own = part.specialize(**{name: numbers[name] for name in part.symbols})
        found += ir.interpret(own, [rows_of(x, part.inputs[0].type, "B", first, rows), w]).outputs[0]
    assert_allclose(found, ir.interpret(function, [x, w]).outputs[0], rtol=1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("loss", "told"), [
    (lambda x, w: np.sum(x - np.mean(x, axis=0)), "single rows, as a batch norm in training does: find_plan"),
    (lambda x, w: np.sum(ir.apply("softmax", x, axis=0)), "it does not compute each row alone: find_plan"),
    (lambda x, w: np.sqrt(np.sum(x ** 2)), "it is not linear in a sum over all rows"),
    (lambda x, w: 1 / np.sum(x), "it is not linear in a sum over all rows"),
    (lambda x, w: np.sum(x) * np.mean(x), "it is not linear in a sum over all rows"),
    (lambda x, w: np.sum(x).astype(np.int64).astype(np.float64), "it is not linear in a sum over all rows"),
    (lambda x, w: np.max(x), "the max over all rows is not a sum"),
    (lambda x, w: np.sum(x @ x.T), "rows are counted by B in one dim"),
    (lambda x, w: np.sum(x.T.reshape(3 * x.shape[0]) * x.reshape(3 * x.shape[0])), "it does not compute each row alone"),
    (lambda x, w: np.sum((x.T.reshape(x.shape) @ w) ** 2), "it does not compute each row alone"),
    (lambda x, w: np.sum(x.T.reshape(3 * x.shape[0]) * np.arange(3.0 * x.shape[0])), "it does not compute each row alone"),
    (lambda x, w: np.sum(w), "is not a sum over the rows of the batch B"),
])
def test_what_is_no_sum_over_rows_is_told(loss, told):
    with pytest.raises(ValueError, match=told):
        microbatched(ir.record(loss, tensor(B, 3), tensor(3, 2)))


def test_symbols_of_a_part_must_be_free():
    function = ir.record(of_mean, tensor(B, ir.symbol("B_whole")), tensor(ir.symbol("B_whole"), 2))
    with pytest.raises(ValueError, match="has a symbol B_whole already"):
        microbatched(function)


@pytest.mark.parametrize(("inputs", "error", "told"), [
    ([np.zeros((4, 3))], ValueError, r"@of_mean takes 2 inputs \(x, w\), got 1"),
    ({"x": np.zeros((4, 3)), "v": 1}, ValueError, "@of_mean takes the inputs x, w; got x, v"),
    ([np.zeros((4, 3)), np.zeros((2, 2))], ValueError, r"input %w: tensor<3x2xf64> .* shape \(2, 2\), with B=4"),
    ([np.zeros((4, 3), "f4"), np.zeros((3, 2))], TypeError, r"input %x: tensor<Bx3xf64> was given an array of float32"),
])
def test_inputs_that_do_not_fit_are_told(inputs, error, told):
    with pytest.raises(error, match=told):
        checked(ir.record(of_mean, tensor(B, 3), tensor(3, 2)), inputs)


# -- laid out on the devices of a stage --------------------------------------------------------------------------------


def test_layouts_agree_on_both_sides_of_every_boundary():
    mesh = Mesh(tp=2)
    stages = partition(CHAIN, ["middle.up", "middle.down", "last"], recompute=[1])
    columns, c = TensorSharding(None, "tp"), stages.functions[2].forward.ops[-1].outputs[0].name
    function = annotate(stages.function, {"w.0": columns, "w.1": TensorSharding("tp", None), c: TensorSharding(...)})
    stages = laid_out_stages(replace(stages, function=function), mesh)
    whole = {value.name: value.layout for value in stages.function.values}
    kept = {}
    for stage in stages.functions:
        functions = [stage.forward, stage.backward, stage.backward_input, stage.backward_weights, stage.recompute]
        for part in filter(None, functions):
            assert all(value.layout is not None for value in part.values)
            assert ir.parse(str(part)) == part == propagate(part, mesh)
            ends = {value.name: value.layout for value in (*part.inputs, *part.outputs)}
            assert {name: ends[name] for name in ends.keys() & whole.keys() & {*stage.received, *stage.sent}}.items() \
                <= whole.items()
            for name, layout in ends.items():
                assert kept.setdefault((stage.sent, name), layout) == layout
        gradients = dict(zip((*stage.returned, *stage.trained), stage.backward.outputs, strict=True))
        assert all(value.layout == gradient_layout(whole[name]) for name, value in gradients.items())
        halves = [*stage.backward_input.outputs[:len(stage.returned)], *stage.backward_weights.outputs]
        assert [value.layout for value in halves] == [value.layout for value in gradients.values()]
    # the gradient of a sum is that of both terms: one value, two layouts
    last = stages.functions[3]
    assert [whole[name] for name in last.received] == [columns, TensorSharding(None, None)]
    assert [op.kind for op in last.backward.ops].count("reshard") == 1


def test_a_gradient_that_lies_otherwise_than_its_weight_is_gathered_right_behind_its_product():
    """Not at the end of the backward: it is added up as soon as it is there, and a block has what is done for it."""
    weights = {"0": tensor(3, 4, dtype="f32"), "1": tensor(4, 6, dtype="f32"), "2": tensor(6, 4, dtype="f32")}
    stages = partition(ir.record(chain, tensor(B, 3, dtype="f32"), tensor(B, 4, dtype="f32"), weights), ["last"])
    up = stages.functions[0].forward.ops[3].outputs[0].name
    function = annotate(stages.function, {up: TensorSharding(None, "cp"), "w.1": TensorSharding(None, None)})
    sums = dict.fromkeys(("w.0", "w.1", "w.2"), np.dtype("f8"))
    first = laid_out_stages(replace(stages, function=function), Mesh(cp=2), sums, pending=True).functions[0]
    for function in (first.backward, first.backward_weights):
        (place,) = (place for place, op in enumerate(function.ops) if op.kind == "reshard")
        product, gather = function.ops[place - 1:place + 1]
        assert gather.inputs == product.outputs and product.outputs[0].layout == TensorSharding(None, "cp")
        assert gather.outputs[0] == function.outputs[1] and gather.outputs[0].layout == TensorSharding(None, None)
        assert function.ops[-1].outputs[0] == function.outputs[0]


def test_a_gradient_may_be_of_some_outputs_by_name():
    def both(x, w):
        return np.sum(x * w), x * w * w, x

    function = ir.record(both, tensor(3), tensor(3))
    loss, square, x = (value.name for value in function.outputs)
    one = ir.gradient(function, ["w"], of=[loss])
    assert [value.name for value in one.inputs] == ["x", "w", f"grad.{loss}"]
    assert_array_equal(ir.interpret(one, [np.arange(3.0), np.ones(3), np.array(2.0)]).outputs[0], [0, 2, 4])
    passed = ir.gradient(function, ["x"], of=[x, square], keep_outputs=True)
    inputs = [np.arange(3.0), np.full(3, 2.0), np.array([1.0, 2, 3]), np.ones(3)]
    assert_array_equal(ir.interpret(passed, inputs).outputs[3], [5, 6, 7])
    with pytest.raises(ValueError, match="@both returns no floating-point w"):
        ir.gradient(function, of=["w"])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=14), st.data())
def test_costs_that_are_integers_are_cut_as_equal_ones_that_are_not(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    sent = data.draw(st.lists(st.integers(0, 5), min_size=len(costs), max_size=len(costs)))
    assert balanced(costs, stages, sent) == balanced(list(map(float, costs)), stages, sent)


def test_the_flops_of_equal_ops_are_counted_once(monkeypatch):
    counted = []
    module = import_module("parallelism.layouts.stages.partition")
    alone = module.specialized_ops
    monkeypatch.setattr(module, "specialized_ops", lambda ops, numbers: counted.append(len(ops)) or alone(
        ops, numbers))
    for layers in (4, 8):
        loss = models.gpt(vocabulary=12, width=8, heads=2, layers=layers, sequence=4, batch=ir.symbol("B"))
        cut = partition(loss, 4)
        plain = partition(loss, 4, cost=lambda op: op.flops)
        assert cut == plain and len(cut) == 4
    assert counted[0] == counted[1] < 40
