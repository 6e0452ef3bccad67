"""Programs with experts, latent attention and predictions of further tokens, beside plain NumPy and central differences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose
from transformed import LATENT, MODELS, ROUTED, arrays, routed

from parallelism import ir, models, simulate
from parallelism.models.expert_feed_forward import choose, slots_of
from parallelism.models.next_tokens import WEIGHT
from parallelism.transforms import SGD, Parts, Strategy, train_step


def silu(x):
    return x / (1 + np.exp(-x))


def experts_of(spec, p, x):
    """The feed-forward of experts of block 0, token by token."""
    experts, out = spec.experts, np.zeros_like(x)
    down, up = (p.get(f"p.0.latent_{name}", np.eye(x.shape[2])) for name in ("down", "up"))
    for place in np.ndindex(x.shape[:2]):
        row = x[place]
        logits = row @ p["p.0.router"]
        score = np.exp(logits) / np.exp(logits).sum() if experts.router == "softmax" else 1 / (1 + np.exp(-logits))
        left = score.copy()
        if experts.groups > 1:
            groups = score.reshape(experts.groups, -1)
            best = np.sort(groups, axis=1)[:, -experts.group_best:].sum(axis=1)
            for group in np.argsort(-best)[experts.groups_chosen:]:
                left.reshape(experts.groups, -1)[group] = -1
        chosen = np.argsort(-left)[:experts.chosen]
        gates = score[chosen] / score[chosen].sum() if experts.normalized else score[chosen]
        for expert, gate in zip(chosen, gates * experts.scale, strict=True):
            given = row @ down
            hidden = silu(given @ p["p.0.expert_gate"][expert]) * (given @ p["p.0.expert_up"][expert])
            out[place] += gate * (hidden @ p["p.0.expert_down"][expert]) @ up
        if experts.shared_width:
            out[place] += (silu(row @ p["p.0.shared_gate"]) * (row @ p["p.0.shared_up"])) @ p["p.0.shared_down"]
    return out


FORMS = {
    "two of four": models.Experts(count=4, chosen=2),
    "one, not normalized": models.Experts(count=3, chosen=1, normalized=False, width=7),
    "sigmoids": models.Experts(count=5, chosen=3, router="sigmoid", scale=2.5, shared_width=6),
    "groups": models.Experts(count=8, chosen=3, router="sigmoid", groups=4, groups_chosen=2, group_best=2),
    "groups by their best": models.Experts(count=6, chosen=2, groups=3, groups_chosen=2, shared_width=9),
    "latent": models.Experts(count=4, chosen=2, latent=5, shared_width=6),
    "room for all": models.Experts(count=4, chosen=2, capacity=2.0),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
def test_experts_are_what_numpy_makes_of_each_token(form):
    spec = routed(sequence=7, experts=FORMS[form])
    function = spec.function(3)
    rng = np.random.default_rng(0)
    given = arrays(function.inputs, rng)
    inside = next(i for i, op in enumerate(function.ops) if op.region == "block.0.feed_forward.router")
    region = "block.0.feed_forward"
    values = values_of(function, given)
    x = values[function.ops[inside].inputs[0].name]
    ends = [op for op in function.ops if (op.region or "").startswith(region)]
    found = values[ends[-1].inputs[1].name]
    assert_allclose(found, experts_of(spec, given, x), rtol=1e-12, atol=1e-12)


@pytest.mark.takes_seconds
def test_latent_experts_are_narrow_and_send_less():
    spec, wide = (routed(experts=models.Experts(count=4, chosen=2, width=7, latent=each)) for each in (5, None))
    assert spec.weights["0.expert_up"] == (4, 5, 7) and spec.weights["0.expert_down"] == (4, 7, 5)
    h = spec.width
    assert (spec.weights["0.latent_down"], spec.weights["0.latent_up"]) == ((h, 5), (5, h))
    layer = 2 * h * 5 + 4 * 3 * 7 * (5 - h)
    assert spec.parameters - wide.parameters == spec.layers * layer
    assert spec.active_parameters - wide.active_parameters == spec.layers * (2 * h * 5 + 2 * 3 * 7 * (5 - h))
    assert spec.forward_flops(8) - wide.forward_flops(8) == 2 * 8 * spec.layers * (2 * h * 5 + 2 * 3 * 7 * (5 - h))
    received = []
    for each in (spec, wide):
        strategy, mesh = Strategy.parse_on_mesh("ep=2")
        step = strategy(train_step(each.function(2), SGD(0.1)))
        received.append(simulate(step, "dgx-h100", mesh=mesh).filter(name="all_to_all").bytes_received(rank=0))
    rows = received[1] / (2 * h + 1)        # there and back, and gates
    assert received[0] == rows * (2 * 5 + 1)


def values_of(function, given):
    """Every value of a function, by name, with room for all tokens."""
    everything = replace(function, outputs=tuple(value for op in function.ops for value in op.outputs))
    outputs = ir.interpret(everything, given).outputs
    return {value.name: array for value, array in zip(everything.outputs, outputs, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mixtral", "capacity", "deepseek", *ROUTED])
def test_gradients_are_those_of_central_differences(model):
    function = MODELS[model](2)
    rng = np.random.default_rng(0)
    given = arrays(function.inputs, rng)
    weights = [value.name for value in Parts.of(function).parameters]
    _, *gradients = ir.interpret(ir.gradient(function, weights, keep_outputs=True), given).outputs
    for name, gradient in zip(weights, gradients, strict=True):
        direction, sides = rng.normal(size=gradient.shape), []
        for step in (1e-6, -1e-6):
            sides.append(ir.interpret(function, given | {name: given[name] + step * direction}).outputs[0])
        assert_allclose((gradient * direction).sum(), (sides[0] - sides[1]) / 2e-6, rtol=1e-5, atol=1e-8, err_msg=name)


def test_a_token_of_a_full_expert_is_dropped():
    spec = routed(experts=models.Experts(count=4, chosen=2, capacity=0.5))
    assert slots_of(spec.experts, 6) == (2, 2, True)                 # ceil(0.5 * 2 * 6 / 4)
    function = spec.function(3)
    given = arrays(function.inputs, np.random.default_rng(0))
    values = values_of(function, given)
    op = next(op for op in function.ops if op.kind == "dispatch")
    chosen, rows = values[op.inputs[1].name], values[op.outputs[0].name]
    taken = (rows != 0).any(axis=3).sum(axis=2)
    wanted = [[min(2, (chosen[sequence] == expert).sum()) for sequence in range(3)] for expert in range(4)]
    assert taken.tolist() == wanted and taken.sum() < chosen.size


@pytest.mark.parametrize(("experts", "tokens", "expected"), [
    ({"count": 8, "chosen": 2}, 4096, (1024, 1)), ({"count": 256, "chosen": 8}, 4096, (128, 1)),
    ({"count": 160, "chosen": 6}, 4096, (160, 5)),                   # 153.6, of which 32 chunks have 5
    ({"count": 128, "chosen": 8, "load": 1.1}, 4096, (288, 9)), ({"count": 4, "chosen": 2, "load": 2.0}, 6, (6, 1)),
    ({"count": 4, "chosen": 1}, 1, (1, 1)), ({"count": 4, "chosen": 2, "load": 9.0}, 6, (6, 1)),
])
def test_slots_without_a_capacity_are_the_even_share_times_the_load(experts, tokens, expected):
    assert slots_of(models.Experts(**experts), tokens) == (*expected, False)


def test_of_equal_scores_the_lower_number_is_chosen():
    chosen, gates = choose(models.Experts(count=4, chosen=2), np.full((1, 1, 4), 0.25))
    assert chosen.tolist() == [[[0, 1]]] and gates.tolist() == [[[0.5, 0.5]]]


def test_the_loss_that_balances_is_1_for_even_experts():
    from parallelism.models.expert_feed_forward import balance_loss
    experts = models.Experts(count=4, chosen=2)
    chosen = np.array([[[0, 1], [2, 3]]])
    assert_allclose(balance_loss(experts, np.full((1, 2, 4), 0.25), chosen), 1)
    assert_allclose(balance_loss(experts, np.array([[[0.7, 0.1, 0.1, 0.1]] * 2]), chosen * 0), 4 * 0.7)


def test_the_mixture_by_masks_gives_the_same_numbers():
    """The program of masks (GShard) and that of indices, for the same weights, capacity and activation."""
    width, hidden, groups, tokens = 6, 8, 3, 5
    mixture = models.mixture(width, hidden, 4, 2, 3, groups, tokens, balance=0.0)
    given = arrays(mixture.inputs, np.random.default_rng(1))
    experts = models.Experts(count=4, chosen=2, capacity=3 * 4 / (2 * tokens))
    spec = routed(width=width, heads=1, feed_forward=hidden, experts=experts, activation="relu", sequence=tokens)

    def loss(p, x, targets):
        from itertools import count

        from parallelism.models.block_parts import Parts as Layers
        from parallelism.models.expert_feed_forward import expert_feed_forward
        y = x + expert_feed_forward(Layers(spec, {f"0.{name}": value for name, value in p.items()}, None, count()), x, "0.")
        return np.mean((y - targets) ** 2)

    types = {"router": (width, 4), "expert_up": (4, width, hidden), "expert_down": (4, hidden, width)}
    batch = ir.TensorType("f64", (groups, tokens, width))
    function = ir.record(loss, {name: ir.TensorType("f64", shape) for name, shape in types.items()}, batch, batch)
    same = {value.name: given[value.name.replace("expert_", "")] for value in function.inputs}
    for one, other in zip(
            ir.interpret(ir.gradient(function, keep_outputs=True), same).outputs,
            ir.interpret(ir.gradient(mixture, keep_outputs=True), given).outputs, strict=True):
        assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_latent_attention_is_what_numpy_makes_of_it():
    spec = replace(routed(attention=LATENT, sequence=5), experts=None)
    function = spec.function(2)
    given = arrays(function.inputs, np.random.default_rng(2))
    values = values_of(function, given)
    x = values[next(op for op in function.ops if op.region == "block.0.attention.qkv").inputs[0].name]

    def norm(y, name):
        return y / np.sqrt((y * y).mean(axis=-1, keepdims=True) + spec.epsilon) * given[f"p.0.{name}"]

    def turned(y):
        angles = np.arange(5)[:, None, None] * spec.rotary_base ** (-np.arange(y.shape[-1] // 2) * 2 / y.shape[-1])
        first, second = y[..., ::2], y[..., 1::2]
        pairs = first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)
        return np.stack(pairs, axis=-1).reshape(y.shape)

    q = (norm(x @ given["p.0.query_down"], "query_norm") @ given["p.0.query_up"]).reshape(2, 5, 4, 9)
    narrow = x @ given["p.0.key_value_down"]
    made = (norm(narrow[..., :6], "key_value_norm") @ given["p.0.key_value_up"]).reshape(2, 5, 4, 8)
    key = np.broadcast_to(turned(narrow[..., None, 6:]), (2, 5, 4, 4))
    q = np.concatenate([q[..., :5], turned(q[..., 5:])], axis=-1)
    k, v = np.concatenate([made[..., :5], key], axis=-1), made[..., 5:]
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / 3
    scores[:, :, ~np.tri(5, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    wanted = np.einsum("bhqk,bkhd->bqhd", weights, v).reshape(2, 5, 12) @ given["p.0.out"]
    assert_allclose(values[last_of(function, "block.0.attention.out")], wanted, rtol=1e-11, atol=1e-12)


def last_of(function, region):
    """The name of what the last op of a region makes."""
    return [op for op in function.ops if op.region == region][-1].outputs[0].name


def test_modules_predict_the_tokens_after_the_next():
    spec = replace(routed(sequence=7, next_tokens=2), experts=None)
    alone = replace(spec, next_tokens=0)
    function, plain = spec.function(3), alone.function(3)
    given = arrays(function.inputs, np.random.default_rng(3))
    loss = ir.interpret(function, given).outputs[0]
    first = ir.interpret(plain, {value.name: given[value.name] for value in plain.inputs}).outputs[0]
    values, wanted = values_of(function, given), []
    for module in range(2):
        logits = values[last_of(function, f"next.{module}.head")][:, : 7 - module - 1]
        targets = given["targets"][:, module + 1:]
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        wanted.append(-np.take_along_axis(logs, targets[..., None], 2).mean())
    assert_allclose(loss, first + WEIGHT * np.mean(wanted), rtol=1e-12)
