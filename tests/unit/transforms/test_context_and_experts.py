"""Context and expert parallelism: what is split, what is moved, and steps of training."""

from __future__ import annotations

from collections import Counter

import pytest
from gated import FORMS, gated
from localized_runs import run_everywhere
from transformed import assert_trained, interpreted, model_step, routed, trained, transformer

from parallelism import models
from parallelism.layouts import localize
from parallelism.transforms import (
    SGD,
    Adam,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Strategy,
    Zero,
    train_step,
)


def check(model, rows, text):
    alone = model_step(model, rows, Adam(0.01), clip=1.0)
    strategy, mesh = Strategy.parse_on_mesh(text)
    assert Strategy.parse(str(strategy)) == strategy
    localized = localize(strategy(alone), mesh)
    assert_trained(trained(alone, lambda inputs: run_everywhere(localized, inputs)), interpreted(alone))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "text"), [
    ("gpt", "cp=2"), ("gpt", "cp=3 dp=2 zero=1"), ("llama", "cp=2 tp=2 sp dp=2 zero=3"), ("dropout", "cp=4"),
    ("plain_gpt", "cp=2 dp=2"), ("factored", "cp=2 dp=2"), ("convolutional", "cp=2"),
])
def test_sequences_are_split_and_a_step_trains_as_alone(model, text):
    check(model, 4, text)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("text", ["ep=2", "ep=4 zero:ep=1", "dp=2 ep=2 zero=1", "dp=3 ep:dp=3 zero=3",
                                  "ep=2 tp=2 dp=2"])
def test_experts_are_split_and_a_step_trains_as_alone(text):
    check("mixture", 6, text)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("text", "axes"), [
    ("ep", {"e": "ep"}), ("ep tp", {"e": "ep", "f": "tp"}), ("ep tp@moe.*", {"e": "ep", "f": "tp"}),
    ("tp", {"f": "tp"}), ("dp ep:dp", {"e": "dp"}), ("dp ep tp zero=3", {"e": "ep", "f": "tp", "d": "dp"})])
def test_every_weight_of_experts_is_split_along_them_and_the_router_is_not(form, text, axes):
    """Each token reaches all experts: the first product has them in its weight and its result alone."""
    step = Strategy.parse(text)(train_step(gated(form, 8), SGD(0.1)))
    layouts = {value.name: value.layout.short() for value in step.inputs if value.layout}
    for name, einsum in (("up", FORMS[form][0]), ("down", FORMS[form][1])):
        letters = einsum.split("->")[0].split(",")[-1]
        assert layouts[f"p.{name}0"] == f"[{', '.join(axes.get(letter, 'None') for letter in letters)}]"
    assert layouts.get("p.router0", "[None, None]") == ("[(dp, ep), None]" if "zero" in text else "[None, None]")


@pytest.mark.sampled(16, 5)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", ["ep=2", "ep=2 tp=2", "dp=2 ep=2 zero=3", "ep=4 tp=2 sp"])
def test_experts_that_every_token_reaches_train_as_alone(form, text):
    alone = train_step(gated(form, 8), SGD(0.1))
    strategy, mesh = Strategy.parse_on_mesh(text)
    localized = localize(strategy(alone), mesh)
    assert_trained(trained(alone, lambda inputs: run_everywhere(localized, inputs)), interpreted(alone))


def moved(loss, text):
    """Collectives by kind, axes and part, with the bytes that a device receives."""
    strategy, mesh = Strategy.parse_on_mesh(text)
    found = Counter()
    for op in localize(strategy(train_step(loss, SGD(0.1))), mesh).program().ops:
        if op.bytes_received and op.kind != "all_reduce":
            found[op.kind, ",".join(op["axes"]), (op.region or "").startswith("gradient")] += op.bytes_received
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("heads", [4, 2])
def test_attention_gathers_keys_and_values_and_scatters_their_gradients(heads):
    # Dubey et al. 2024, section 3.3.2: keys and values are gathered, so fewer heads of them move fewer bytes.
    spec = transformer(layers=3, sequence=8, key_value_heads=heads)
    pair = 2 * 8 * spec.layers * 4 * spec.sequence * spec.head_width * heads // 2      # 4 rows of float64, the half
    assert moved(spec.function(4), "cp=2") == {
        ("all_gather", "cp", False): pair, ("all_gather", "cp", True): pair, ("reduce_scatter", "cp", True): pair}


def test_tokens_go_to_their_experts_and_back():
    # Lepikhin et al. 2020, section 3.2: two all_to_alls of every slot of every group forward, and as many backward; but
    # here the tokens are inputs, without a gradient, so one backward.
    groups, experts, capacity, width = 8, 4, 3, 6
    slots = 8 * groups * experts * capacity * width
    loss = models.mixture(width, 8, experts, 2, capacity, groups, 5)
    found = moved(loss, "ep=2")
    each = slots // 2 // 2      # a device has a half of the slots, and half of these lie on the other
    assert found == {("all_to_all", "ep", False): 2 * each, ("all_to_all", "ep", True): each}
    strategy, mesh = Strategy.parse_on_mesh("ep=2")
    program = localize(strategy(train_step(loss, SGD(1))), mesh).program()
    local = {value.name: value.type.shape for value in program.inputs}
    assert local["p.up"] == (2, 6, 8) and local["p.router"] == (6, 4) and local["x"] == (4, 5, 6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("ep", "tp", "load"), [(2, 1, 1.0), (4, 1, 1.5), (2, 2, 1.0)])
def test_rows_of_a_transformer_go_to_their_experts_and_back(ep, tp, load):
    # Lepikhin et al. 2020, section 3.2: of k rows of each token a device keeps 1 / ep; there and back, forward and backward.
    # Their gates travel with them. With sequence parallelism a device deals its part of the tokens: 1 / tp of the bytes.
    spec = routed(sequence=8, layers=3, experts=models.Experts(count=4, chosen=2, load=load))
    text = f"ep={ep}" + (f" tp={tp} sp" if tp > 1 else "")
    rows = load * 2 * (8 // ep * spec.sequence // tp) * (ep - 1) / ep      # 8 sequences, two experts for each token
    each = {key: found for key, found in moved(spec.function(8), text).items() if key[0] == "all_to_all"}
    # The gradient of a gate is a sum over tp, so each device moves those of the whole sequence.
    assert each == {("all_to_all", "ep", False): 3 * 8 * rows * (2 * spec.width + 1),
                    ("all_to_all", "ep", True): 3 * 8 * rows * (2 * spec.width + tp)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("text", "axes"), [
    ("ep:ep+tp=2 tp=2 sp", {"ep": 2, "tp": 2}), ("ep:ep+tp=1 tp=4 sp", {"tp": 4}), ("cp=2 ep:ep+cp=2", {"ep": 2, "cp": 2}),
    ("cp=2 ep:ep+cp+tp=1 tp=2 sp", {"cp,tp": 4})])
def test_rows_of_experts_over_several_axes_go_over_those_of_sequences_by_themselves(text, axes):
    # A device has 1 / 4 of the experts and of the rows of all tokens, and keeps 1 / n of them where n devices exchange.
    spec = routed(sequence=8, layers=3, experts=models.Experts(count=4, chosen=2))
    each = {key: found for key, found in moved(spec.function(8), text).items() if key[0] == "all_to_all"}
    rows = 8 * spec.sequence * 2 // 4
    assert each == {("all_to_all", axis, back): 3 * 8 * 2 * rows * (n - 1) // n * (2 * spec.width + 1) // 2
                    for axis, n in axes.items() for back in (False, True)}
    step = Strategy.parse_on_mesh(text)[0](train_step(spec.function(8), SGD(0.1)))
    layouts = {value.name: value.layout.short() for value in step.inputs if value.layout}
    over = text.split("ep:")[1].split("=")[0].replace("+", ", ")
    assert [layouts[f"p.0.expert_{name}"] for name in ("up", "gate", "down")] == [f"[({over}), None, None]"] * 3


@pytest.mark.takes_seconds
@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize(("text", "axes"), [("ep=2", ("ep",)), ("ep:ep+tp=2 tp=2 sp", ("ep",)), ("ep=4 tp=2 sp", ("ep",))])
def test_rows_that_are_sent_once_are_named_so_where_they_go_to_all_experts_and_nothing_else_changes(text, axes):
    def program(deduplicated):
        spec = routed(sequence=8, layers=3, experts=models.Experts(count=4, chosen=2, deduplicated=deduplicated))
        strategy, mesh = Strategy.parse_on_mesh(text)
        return localize(strategy(train_step(spec.function(8), SGD(0.1))), mesh).program()

    plain, marked = program(False), program(True)
    name = {"algorithm": "deduplicated(2 of 4)", "sent": "deduplicated(2 of 4)"}
    found = Counter()
    for op, before in zip(marked.ops, plain.ops, strict=True):
        given, added = dict(op.attributes), dict(op.attributes).keys() - dict(before.attributes).keys()
        found.update((op.kind, *given.get("axes", ()), len(op.inputs[0].type.shape)) for _ in added)
        assert all(given[each] == name[each] for each in added)
        assert (op.kind, op.inputs, op.outputs) == (before.kind, before.inputs, before.outputs)
        assert {key: value for key, value in given.items() if key not in added} == dict(before.attributes)
    # Three layers: rows go there and back in the forward, and in the backward; their gates are no rows.
    assert found == {("all_to_all", *axes, 4): 12, ("dispatch", 3): 6, ("combine", 4): 6}


def test_what_is_no_expert_is_split_over_both_axes_of_replicas_and_an_expert_over_its_own():
    # With etp = tp an expert has tp cp dp / (tp ep) replicas; here dp counts those of everything else, 2 x 4.
    step = Strategy.parse("dp ep tp zero=1")(model_step("mixtral", 8, Adam(0.01)))
    layouts = {value.name: value.layout.short() for value in step.inputs if value.layout}
    assert layouts["p.0.expert_up"] == "[ep, None, tp]" and layouts["mean.p.0.expert_up"] == "[ep, dp, tp]"
    assert layouts["p.0.qkv"] == "[None, tp]" and layouts["mean.p.0.qkv"] == "[(dp, ep), tp]"
    assert layouts["p.0.router"] == "[None, None]" and layouts["mean.p.0.router"] == "[(dp, ep), None]"


GPT = model_step("gpt", 4, SGD(0.1))
MIXTURE = model_step("mixture", 4, SGD(0.1))


@pytest.mark.parametrize("order", [("cp", "dp", "tp"), ("tp", "cp", "dp", "sp"), ("tp", "sp", "dp", "cp")])
def test_the_order_of_context_parallelism_does_not_matter(order):
    step = GPT
    for text in order:
        step = Strategy.parse(text)(step)
    assert step == Strategy.parse(" ".join(order))(GPT)


@pytest.mark.parametrize(("build", "message"), [
    (lambda: ContextParallel()(ContextParallel()(GPT)), "cp: %tokens.order of @transformer.step is split over 'cp' already"),
    (lambda: ContextParallel()(model_step("mlp", 4, SGD(1))), "cp: the inputs of @mlp.step have no sequence"),
    (lambda: ExpertParallel()(GPT), "ep: no weight of @transformer.step is left to be split over 'ep'"),
    (lambda: ExpertParallel()(ExpertParallel()(MIXTURE)), "ep: no weight of @mixture.step is left"),
])
def test_what_has_no_sequence_or_no_experts_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("rule", [SGD(0.1), Adam()])
def test_context_parallelism_comes_before_what_zero_shares_out(stage, rule):
    step = DataParallel()(train_step(transformer().function(4), rule))
    with pytest.raises(ValueError, match=r"^cp: what @transformer\.step holds is shared out .* cp comes before Zero"):
        ContextParallel()(Zero(stage)(step))
    assert Zero(stage)(ContextParallel()(step)) == Strategy(Zero(stage), ContextParallel())(step)
