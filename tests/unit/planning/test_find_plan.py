"""`find_plan`: the plans of small spaces against the simulation of each, and what is said about the others."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parallelism import Hardware, Mesh, ir, models, simulate
from parallelism.display.quantities import rate, seconds
from parallelism.ir.tracing import apply
from parallelism.planning import SETTINGS, NoPlanFits, Plans, find_plan, search
from parallelism.planning.explanation import Account, why, why_not
from parallelism.planning.plan import Task
from parallelism.planning.space import choices
from parallelism.planning.trained import TrainedModel
from parallelism.training import figures
from parallelism.transforms import Adam, Strategy

SPEC = models.TransformerSpec(
    layers=2, width=12, heads=2, vocabulary=22, sequence=6, biases=False, norm="rms", activation="relu")
FEW = {"microbatch": 2, "recompute": "none", "order": "pp dp cp tp"}


@pytest.fixture(scope="module")
def plans() -> Plans:
    return find_plan(SPEC, hardware="dgx-h100", devices=2, batch=4, schedule="1f1b", sp=False, zero=[0, 1], **FEW)


@pytest.mark.slow
def test_the_plans_are_those_of_the_space(plans: Plans) -> None:
    found = {(plan.mesh, plan.settings["zero"]) for plan in plans}
    assert found == {(Mesh(pp=1, dp=2), 0), (Mesh(pp=1, dp=2), 1), (Mesh(pp=1, tp=2), 0), (Mesh(pp=2), 0)}
    assert len(plans) == plans.timed == 4
    assert plans.considered == 4 + sum(each.count for each in plans.refused.values())
    assert plans[0] == plans.best
    assert [plan.seconds for plan in plans[1:]] == [plan.seconds for plan in plans][1:]


@pytest.mark.takes_seconds
def test_a_plan_is_what_the_simulation_says(plans: Plans) -> None:
    for plan in plans:
        trace = simulate(plan.step, plans.task.hardware, mesh=plan.mesh, batch=4, fold=True, link_sharing=False)
        assert plan.bound_seconds == pytest.approx(trace.makespan_seconds, rel=1e-12)
        assert plan.peak_bytes == max(trace.peaks().values())
        assert plan.strategy == Strategy.parse_on_mesh(str(plan))[0]
        assert set(plan.settings) == set(SETTINGS)
        assert plan.microbatch == 2
        assert plan.microbatches == 2 // plan.settings["dp"]


@pytest.mark.takes_seconds
def test_a_best_plan_that_is_called_says_what_to_write(plans: Plans) -> None:
    best: Any = plans.best
    with pytest.raises(TypeError, match=r"^plans\.best is no method: write plans\.best, without \(\)"):
        best()


@pytest.mark.takes_seconds
def test_the_first_plan_is_the_best_by_the_full_simulation(plans: Plans) -> None:
    full = [plan.simulate().makespan_seconds for plan in plans]
    assert plans.best.seconds == min(full) == full[0]
    assert plans.gap == 0
    assert plans.best.is_simulated
    assert plans.simulated == sum(plan.is_simulated for plan in plans)


def test_memory_by_category(plans: Plans) -> None:
    plan = next(plans.where(pp=2))
    first, last = plan.memory
    assert first.keys() == last.keys() == {"weights", "gradients", "optimizer", "activations", "other"}
    # Adam on float32: the state is two copies of the weights, and the number of updates.
    assert first["optimizer"] == 2 * first["weights"] + 8
    assert sum(first.values()) >= plan.peak_bytes or sum(last.values()) >= plan.peak_bytes


@pytest.mark.slow
def test_hardware_without_float64_trains_under_adam() -> None:
    narrow = replace(SPEC, dtype="bfloat16")
    plan = find_plan(narrow, hardware="tpu-v4", devices=1, batch=2, microbatch=2, recompute="none", zero=0).best
    assert {event.dtype for event in plan.simulate() if event.name == "power"} == {"float64"}


def test_the_front_has_no_plan_that_another_beats(plans: Plans) -> None:
    assert plans.front[0].seconds == min(plan.seconds for plan in plans)
    for one, other in zip(plans.front, plans.front[1:], strict=False):
        assert one.seconds <= other.seconds and one.peak_bytes > other.peak_bytes


def test_a_plan_that_there_is_not(plans: Plans) -> None:
    assert plans[-len(plans)] == plans[0]
    for row in (len(plans), -len(plans) - 1):
        with pytest.raises(IndexError, match=f"there are {len(plans)} plans, numbered from 0, the best first; got {row}"):
            plans[row]


def test_why_not(plans: Plans) -> None:
    best = plans.best
    with pytest.raises(TypeError, match=r"why_not takes the settings that are asked about, such as why_not\(tp=8\)"):
        best.why_not()
    assert best.why_not(dp=best.settings["dp"]) == f"this plan has dp={best.settings['dp']}"
    other = next(plans.where(tp=2))
    longer, figures = other.seconds - best.seconds, (other.figures.parts, best.figures.parts)
    exposed, again = (parts.get("tp", 0) for parts in figures)
    assert best.why_not(tp=2).startswith(
        f"the best plan with tp=2 (tp=2 mb=2) takes {seconds(longer)} ({longer / best.seconds:.1%}) more: "
        f"tp +{seconds(exposed - again)}, ")
    links = other.figures.links["tp"]
    assert best.why_not(tp=2).endswith(
        f". Its collectives over tp cross nvlink, where a device receives {rate(links['bytes'] / links['seconds'])} in "
        "calls of such sizes")
    assert best.why_not(tp=4) == "no plan has tp=4: tp does not divide the devices (1)"
    with pytest.raises(ValueError, match="no setting 'zeros'; did you mean 'zero'"):
        best.why_not(zeros=2)


@pytest.mark.slow
def test_why_not_what_was_not_searched(plans: Plans) -> None:
    sooner = Task.simulate(plans.task, plans.best.settings | {"pp": 1, "dp": 2, "zero": 0, "overlap": True})
    longer = sooner.makespan_seconds - plans.best.seconds
    assert f"(dp=2 overlap mb=2) takes {seconds(abs(longer))} (" in plans.best.why_not(pp=1, zero=0, overlap=True)
    assert plans.best.why_not(schedule="gpipe", pp=2, zero=0).startswith(
        "the best plan with schedule=gpipe pp=2 zero=0 (pp=2 gpipe mb=2) takes ")


@pytest.mark.takes_seconds
def test_why_not_what_the_program_refuses() -> None:
    vector = ir.TensorType("f4", (8,))
    program = ir.record(lambda p, x: np.mean((x * p["a"] + p["b"]) ** 2), {"a": vector, "b": vector},
                        ir.TensorType("f4", (ir.symbol("B"), 8)))
    best = find_plan(program, hardware="dgx-h100", devices=2, batch=2, pp=1, zero=0, microbatch=1, simulations=1).best
    assert best.why_not(tp=2).startswith(
        "no plan has tp=2: tp: no weight of @lambda.step is left to be split over 'tp': ")
    assert best.why_not(tp=2).endswith(" (1)")


@pytest.mark.takes_seconds
def test_why_the_first_and_why_not_another(plans: Plans) -> None:
    first, second, *_ = plans
    less = second.figures.seconds - first.seconds
    told = f"{seconds(less)} ({less / first.seconds:.1%}) more: "
    assert first.why().startswith(f"the second ({second.split}) takes {told}")
    share = less / second.seconds
    assert second.why().startswith(f"the first ({first.split}) takes {seconds(less)} ({share:.1%}) less")


def test_ctrl_c_leaves_the_plans_that_were_timed(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(task: Task, settings: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "figures_of", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"^stopped after 0 full simulations$") as stopped:
        plans.again(schedule="1f1b", sp=False, zero=[0, 1], **FEW)
    assert isinstance(stopped.value, search.Stopped)
    found = stopped.value.plans
    assert (found.simulated, found.gap, found.timed) == (0, 1.0, plans.timed)
    assert found.bounds.tolist() == sorted(plans.bounds) and found[0].seconds == found.bounds[0]


@pytest.mark.slow
def test_why_an_axis_is_not_inside_of_a_node() -> None:
    pair = Hardware.of("dgx-h100")
    hardware = replace(pair, links=tuple(replace(link, extents=(2,)) for link in pair.links))
    given: dict[str, Any] = {"hardware": hardware, "batch": 4, "pp": 1, "zero": 0, "sp": False, "microbatch": 2,
                             "recompute": "none"}
    spec = replace(SPEC, width=16, heads=4, vocabulary=24)
    found = find_plan(spec, **given)
    inside, between = next(found.where(tp=2)), next(found.where(tp=4))
    more = between.figures.seconds - inside.figures.seconds
    assert inside.settings["order"].endswith("tp") and more > 0
    assert found.why_between_nodes(inside, "tp") == found.why_between_nodes(between, "ep") == ""
    assert found.why_between_nodes(between, "tp").startswith(
        f"the best plan with tp inside of a node of 2 devices ({found[0].split}) takes "
        f"{seconds(between.figures.seconds - found[0].figures.seconds)} (")
    apart = find_plan(spec, tp=4, **given)
    assert apart.why_between_nodes(apart.best, "tp") == "no plan that fits has tp inside of a node of 2 devices"


def test_equal_plans_take_as_long() -> None:
    first = Account("pp=2 mb=2", 0.3, {"products": 0.2, "bubble": 0.1}, {})
    assert why(first, first._replace(split="pp=2 mb=1")) == "the second (pp=2 mb=1) takes as long"
    other = Account("tp=2 mb=2", 0.1 + 0.2, {"products": 0.2, "tp": 0.1}, {})     # as long up to rounding
    assert other.seconds != first.seconds
    assert why(first, other) == "the second (tp=2 mb=2) takes as long: tp +100 ms, bubble -100 ms"
    assert why(first, other._replace(seconds=0.3003)).startswith("the second (tp=2 mb=2) takes 300 us (0.1%) more: ")
    assert why_not("tp=2", other, first).startswith("the best plan with tp=2 (tp=2 mb=2) takes as long: ")


@pytest.mark.takes_seconds
def test_overlap_is_a_setting() -> None:
    late, early = sorted(find_plan(SPEC, hardware="dgx-h100", devices=2, batch=4, dp=2, zero=0, overlap=[0, 1], **FEW),
                         key=lambda plan: bool(plan.settings["overlap"]))
    assert early.seconds < late.seconds and "overlap" in early.split and "overlap" not in late.split
    assert early.seconds == early.simulate().makespan_seconds


@pytest.mark.slow
def test_zero_3_goes_with_stages_and_microbatches() -> None:
    plan, = find_plan(SPEC, hardware="dgx-h100", devices=4, batch=8, pp=2, dp=2, zero=3, schedule="1f1b", **FEW)
    assert str(plan) == "dp=2 zero=3 pp@block.1=2 1f1b:2" and plan.seconds == plan.simulate().makespan_seconds
    sharded = plan.memory[0]["weights"]
    whole, = find_plan(SPEC, hardware="dgx-h100", devices=4, batch=8, pp=2, dp=2, zero=1, schedule="1f1b", **FEW)
    assert sharded < whole.memory[0]["weights"] < 2.1 * sharded


@pytest.mark.slow
def test_words_of_fully_sharded_data_parallelism_stand_for_several_settings() -> None:
    def only(**fixed: Any) -> Any:
        plan, = find_plan(SPEC, hardware="dgx-h100", devices=8, batch=8, **FEW | {"microbatch": 1} | fixed)
        return plan

    fsdp, hsdp, zero = only(fsdp=8), only(hsdp="2x4"), only(dp=8, zero=3, overlap=True)
    assert (fsdp.strategy, fsdp.seconds, fsdp.settings) == (zero.strategy, zero.seconds, zero.settings)
    assert str(hsdp) == "dp:replica=2 dp=4 zero=3 overlap pp=1 1f1b:1" and hsdp.mesh == Mesh(pp=1, replica=2, dp=4)
    assert hsdp.split == "dp=8 zero=3 instances=2 overlap mb=1" and hsdp.run.replicas == 8
    assert hsdp.seconds == hsdp.simulate().makespan_seconds
    assert hsdp.memory[0]["weights"] == pytest.approx(2 * fsdp.memory[0]["weights"], rel=0.1)
    late = only(hsdp="2x4", overlap=False)
    assert late.seconds > hsdp.seconds and not late.settings["overlap"]
    first = only(dp=8, zero=1, instances=4)
    assert str(first) == "dp:replica=4 dp=2 zero=1 pp=1 1f1b:1"
    assert first.seconds == pytest.approx(first.simulate().makespan_seconds, rel=1e-12)
    assert first.figures.seconds == first.simulate().makespan_seconds
    assert "with hsdp=2x4 " in fsdp.why_not(hsdp="2x4")


@pytest.mark.slow
def test_ways_to_see_whole_sequences_are_a_setting() -> None:
    spec = replace(SPEC, heads=4, width=16, sequence=24, vocabulary=32)
    plans = find_plan(spec, hardware="dgx-h100", devices=8, batch=4, pp=1, cp=4, zero=1,
                      exchange=["all_gather", "p2p", "a2a", "a2a+p2p"], simulations=None, **FEW)
    found = {(plan.settings["exchange"], plan.settings["tp"]): plan for plan in plans}
    assert {key: str(plan) for key, plan in found.items() if key[1] == 1} == {
        ("all_gather", 1): "dp=2 cp=4 zero=1 pp=1 1f1b:1", ("p2p", 1): "dp=2 ring=4 zero=1 pp=1 1f1b:1",
        ("a2a", 1): "dp=2 ulysses=4 zero=1 pp=1 1f1b:1",
        ("a2a+p2p", 1): "dp=2 ring=2 ulysses:cp_heads=2 zero=1 pp=1 1f1b:1"}
    assert ("a2a", 2) not in found and str(found["p2p", 2].mesh) == str(Mesh(pp=1, cp=4, tp=2))
    assert plans.refused["cp does not divide the heads of keys and values that exchange=a2a deals out"].count
    for plan in plans:
        assert plan.seconds == pytest.approx(plan.simulate().makespan_seconds, rel=1e-12)
        assert plan.peak_bytes == max(plan.simulate().peaks().values())
    assert found["p2p", 1].split == "dp=2 cp=4 exchange=p2p zero=1 mb=2"
    searched = find_plan(spec, hardware="dgx-h100", devices=8, batch=4, pp=1, cp=4, zero=1, simulations=None, **FEW)
    assert [str(plan) for plan in searched] == [str(plan) for plan in plans] and not searched.one_by_one
    unfused = find_plan(replace(spec, fused_attention=False), hardware="dgx-h100", devices=8, batch=4, pp=1, cp=4, **FEW)
    assert {plan.settings["exchange"] for plan in unfused} == {"all_gather"}
    small = found["a2a+p2p", 1].scaled_down()
    assert small.mesh == found["a2a+p2p", 1].mesh and small.step


@pytest.mark.slow
def test_stages_may_have_one_layer_fewer() -> None:
    spec = replace(SPEC, layers=3)
    plan, = find_plan(spec, hardware="dgx-h100", devices=2, batch=4, pp=2, schedule="1f1b", balanced=False, **FEW)
    assert str(plan) == "pp@block.1=2 1f1b:2"
    assert plan.seconds == plan.simulate().makespan_seconds and plan.peak_bytes == plan.figures.peak_bytes
    searched = find_plan(spec, hardware="dgx-h100", devices=2, batch=4, schedule="1f1b", tp=1, dp=1, balanced=False,
                         **FEW)
    assert str(searched[0]) == str(plan) and searched[0].seconds == plan.seconds
    assert "there are more stages than blocks (3)" in find_plan(
        spec, hardware="dgx-h100", devices=4, batch=4, pp=4, **FEW).refusals


def test_the_text_fits_a_terminal(plans: Plans) -> None:
    text = str(plans)
    assert "4 plans fit" in text
    assert all(len(line) <= 110 for line in text.splitlines())


@pytest.mark.slow
def test_a_plan_in_float32_says_so_and_what_the_hardware_has_for_narrower_products() -> None:
    for name, told, slow in (("float32", "training in float32: ", "dgx-h100 has 67 Tflop/s for float32 and 989.5 for"),
                             ("bfloat16", "training in bfloat16 with main copies in float32: ", "")):
        found = find_plan(replace(SPEC, dtype=name), hardware="dgx-h100", devices=1, batch=2, **FEW)
        text = " ".join(str(found).split())
        assert text.startswith(told) and slow in text and ("Tflop/s" in text) == bool(slow)
        assert told.removesuffix(": ") in found._repr_html_() and ("Tflop/s" in found._repr_html_()) == bool(slow)
    slower = find_plan(SPEC, hardware="laptop", devices=1, batch=2, **FEW)
    assert "Tflop/s" not in str(slower)


@pytest.mark.takes_seconds
def test_nothing_fits() -> None:
    plans = find_plan(SPEC, hardware="dgx-h100", devices=1, batch=2, memory="10kB", **FEW)
    assert len(plans) == 0
    assert (plans.refused["memory"].count, plans.timed) == (1, 0)
    assert plans.tightest is not None
    assert str(plans).startswith("training in float32: 0 plans fit of 1 combinations;") and "none fits" in str(plans)
    assert "the first" not in str(plans) and "the first" not in plans._repr_html_()
    with pytest.raises(NoPlanFits, match=r"the smallest \(mb=2\) needs .* of 10 kB on stage 0: optimizer "):
        plans.best  # noqa: B018


def test_a_cap_on_simulations_is_told() -> None:
    plans = find_plan(SPEC, hardware="dgx-h100", devices=1, batch=4, simulations=0, pp=1, recompute="none",
                      microbatch=[2, 4])
    assert len(plans) == 2
    assert plans.simulated == 0
    assert plans.gap == 1


@pytest.mark.parametrize(("model", "split"), [
    (models.TransformerSpec(layers=2, width=24, heads=4, vocabulary=24, sequence=6), {1: 0, 2: 1, 4: 0}),
    (models.TransformerSpec(layers=2, width=24, heads=4, vocabulary=24, sequence=8), {1: 0, 2: 1, 4: 1}),
    (models.mlp((8, 8, 4), ir.symbol("B")), {1: 0, 2: 0, 4: 0}),
])
def test_sequence_parallelism_goes_with_tp_where_it_divides_the_sequence(model, split: dict[int, int]) -> None:
    trained = TrainedModel.of(model, Adam())
    columns = choices(trained, 4, 4, {}).columns
    assert {*zip(columns["tp"].tolist(), columns["sp"].tolist(), strict=True)} == {*split.items()}
    asked = choices(trained, 4, 4, {"sp": [False, True]})
    fits = [tp for tp in (2, 4) if trained.sequence is None or trained.sequence % tp == 0]
    assert {*zip(asked["tp"].tolist(), asked["sp"].tolist(), strict=True)} == {
        (1, 0), (2, 0), (4, 0), *((tp, 1) for tp in fits)}


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [
    {"pp": 1, "tp": 1}, {"pp": 2, "tp": 1}, {"pp": 1, "tp": 2}, {"pp": 2, "tp": 2, "recompute": "full"}])
def test_plans_that_differ_in_zero_1_or_2_are_one_program(fixed: dict[str, Any]) -> None:
    spec = replace(SPEC, dtype="bfloat16", layers=fixed["pp"])
    plans = find_plan(spec, hardware="dgx-h100", devices=2 * fixed["pp"] * fixed["tp"], batch=8,
                      schedule="1f1b", simulations=0, **FEW | {"zero": [1, 2]} | fixed)
    by_settings = {tuple(sorted(plan.settings.items())): plan for plan in plans}
    pairs = [(plan, other) for plan in plans if plan.settings["zero"] == 1 and (
        other := by_settings.get(tuple(sorted({**plan.settings, "zero": 2}.items())))) is not None]
    assert pairs
    for plan, other in pairs[:1]:
        assert (plan.bound_seconds, plan.peak_bytes) == (other.bound_seconds, other.peak_bytes)
        assert plan.figures.step is other.figures.step and "zero=1" in str(plan) and "zero=2" in str(other)
        alone = figures(other.run, plans.task.hardware)                     # simulated by itself
        assert (alone.seconds, alone.parts, alone.memory) == (
            plan.figures.seconds, plan.figures.parts, plan.figures.memory)
        assert other.figures.json()["strategy"] == alone.json()["strategy"] != plan.figures.json()["strategy"]


@pytest.mark.slow
def test_of_plans_that_are_one_program_one_is_told() -> None:
    plans = find_plan(SPEC, hardware="dgx-h100", devices=4, batch=8, schedule="1f1b", tp=1, zero=[1, 2], **FEW)
    first, second, *_ = told = [*plans.programs()]
    twins = [plan for plan in plans if plan not in told]
    assert {plan.split.replace("zero=2", "zero=1") for plan in twins} == {plan.split for plan in told}
    assert first.why().startswith(f"the second ({second.split}) takes ") and first.program != second.program
    assert plans[1] == twins[0] and plans[1].why() == f"the first ({first.split}) is the same program"
    assert first.why_not(zero=2) == "with zero=2 the program is the same"
    for text in (str(plans), plans._repr_html_()):
        assert first.split in text and "zero=2 mb" not in text and "zero=1 and zero=2 are the same program" in text
    alone = find_plan(SPEC, hardware="dgx-h100", devices=2, batch=4, schedule="1f1b", dp=2, zero=[1, 2], **FEW)
    assert len(alone) == 2 and alone.best.why() == "no other plan fits"
    assert "are the same program" not in str(alone.again(dp=2, zero=1, **FEW))


def test_stages_may_be_uneven_but_not_those_of_an_interleaved_schedule_or_of_a_program_without_blocks() -> None:
    spec, program = models.TransformerSpec(layers=5, width=8, heads=2, vocabulary=8, sequence=4), models.gpt(
        vocabulary=11, width=8, heads=2, layers=5, sequence=4, batch=ir.symbol("B"))
    for model in (spec, program):
        split = choices(TrainedModel.of(model, Adam()), 4, 8, {"tp": 1, "dp": 1})
        assert {*zip(split["pp"].tolist(), split["chunks"].tolist(), strict=True)} == {(4, 1)}
    other = {f"block.{layer}.attention": 2.0 + layer for layer in range(5)}      # no two blocks compute alike
    ops = [replace(op, attributes=op.attributes if op.kind != "constant" else (
        *(pair for pair in op.attributes if pair[0] != "value"), ("value", other[op.region]))) for op in program.ops]
    unlike = TrainedModel.of(replace(program, ops=tuple(ops)), Adam())
    refused = choices(unlike, 4, 8, {"dp": 1, "schedule": "1f1b"}).refused
    assert unlike.alike is None and refused["stages do not divide the blocks"].count > 0


def test_tp_divides_the_vocabulary_of_a_model_by_its_name() -> None:
    named, exact = (TrainedModel.of(model, Adam()) for model in ("gpt3-13b", models.transformer("gpt3-13b")))
    assert {*choices(named, 8, 8, {"tp": 4})["tp"].tolist()} == {4}
    assert named.precision is not None and named.precision.dtype == "bfloat16" and exact.precision is None
    refused = choices(exact, 8, 8, {"tp": 4}).refused
    assert [*refused] == ["tp does not divide the vocabulary"]


@pytest.mark.slow
def test_gradients_are_planned_in_the_dtype_that_is_said() -> None:
    spec, fixed = replace(SPEC, dtype="bfloat16"), {"dp": 2, "pp": 1, "microbatch": 1, "recompute": "none", "zero": 1}
    wide, narrow = (find_plan(spec, hardware="dgx-h100", devices=2, batch=4, gradients=dtype, **fixed).best
                    for dtype in ("float32", "bfloat16"))
    kept = [plan.figures.memory[0]["gradients"] for plan in (wide, narrow)]
    assert kept[0] - kept[1] == 2 * spec.parameters
    assert narrow.peak_bytes < wide.peak_bytes and "precision=bf16,bf16" in str(narrow.strategy)
    assert narrow.peak_bytes == max(narrow.simulate().peaks().values())
    assert narrow.seconds == pytest.approx(narrow.bound_seconds, rel=1e-12)
    for model, what in ((replace(SPEC, dtype="float32"), "a model in float32"), (MODEL, "a program")):
        with pytest.raises(ValueError, match=rf"^gradients=bfloat16 is for mixed precision, .* 16 bits; got {what}"):
            find_plan(model, hardware="dgx-h100", devices=2, batch=4, gradients="bfloat16")


@pytest.mark.slow
def test_state_is_planned_in_the_dtypes_that_are_said() -> None:
    spec, fixed = replace(SPEC, dtype="bfloat16"), {"pp": 1, "microbatch": 1, "recompute": "none", "zero": 1, "dp": 2}
    state = {"main": "float16", "mean": "bfloat16", "square": "bfloat16"}
    wide, narrow = (find_plan(spec, hardware="dgx-h100", devices=2, batch=4, state=kept, **fixed).best
                    for kept in (None, state))
    kept = [plan.figures.memory[0]["optimizer"] for plan in (wide, narrow)]
    assert kept[0] - kept[1] == 6 * spec.parameters // 2
    assert "precision=bf16,main:f16,mean:bf16,square:bf16" in str(narrow.strategy)
    assert narrow.peak_bytes == max(narrow.simulate().peaks().values())
    assert narrow.seconds == pytest.approx(narrow.bound_seconds, rel=1e-12)
    assert narrow.task.model.dtypes == "bfloat16 with main copies in float16, means in bfloat16, squares in bfloat16"
    for model, what in ((replace(SPEC, dtype="float32"), "a model in float32"), (MODEL, "a program")):
        with pytest.raises(ValueError, match=rf"^state=.* is for mixed precision, .* 16 bits; got {what}"):
            find_plan(model, hardware="dgx-h100", devices=2, batch=4, state=state)


MODEL = models.mlp((6, 8, 3), ir.symbol("B"))


@pytest.mark.takes_seconds
def test_the_program_of_a_loss_is_planned() -> None:
    plans = find_plan(MODEL, hardware=Hardware.preset("dgx-h100:1").placed(range(2)), batch=4, microbatch=2, zero=0,
                      dp=2, pp=1, recompute="none")
    assert [str(plan) for plan in plans] == ["dp=2 pp=1 1f1b:1"]


@pytest.mark.takes_seconds
def test_what_a_program_does_not_allow_is_refused_with_its_reason() -> None:
    rows = ir.symbol("B")
    program = ir.record(lambda p, x, y: np.mean((x @ p["w"] - y) ** 2), {"w": ir.TensorType("f32", (16, 24))},
                        ir.TensorType("f32", (rows, 16)), ir.TensorType("f32", (rows, 24)))
    plans = find_plan(program, hardware="dgx-h100", devices=8, batch=8, microbatch=1, zero=0, schedule="1f1b", dp=1,
                      sp=[False, True])
    assert {(plan.settings["pp"], plan.settings["sp"]) for plan in plans} == {(1, False), (2, False), (4, False)}
    words = {reason.split(" ")[0]: each.count for reason, each in plans.refused.items()}
    assert words["5"] == 1      # ops, of which 8 stages cannot be cut
    assert words["sp:"] == 3


def dealt(p, x, y):
    """A loss behind four experts, of which each token takes two."""
    chosen = np.argsort(-(x @ p["router"]), axis=2)[:, :, :2]
    how = {"each": 3, "first": 0, "drops": False}
    rows = apply("dispatch", x, chosen, shape=(4, x.shape[0], 3, 16), **how)
    made = np.maximum(np.einsum("ebch,ehf->ebcf", rows, p["up"]), 0)
    made = np.einsum("ebcf,efh->ebch", made, p["down"])
    return np.mean((apply("combine", made, chosen, **how) - y) ** 2)


@pytest.mark.takes_seconds
def test_the_experts_of_a_program_are_split_where_their_number_allows_it() -> None:
    shapes = {"router": (16, 4), "up": (4, 16, 24), "down": (4, 24, 16)}
    tokens = ir.TensorType("f32", (ir.symbol("B"), 6, 16))
    program = ir.record(dealt, {name: ir.TensorType("f32", shape) for name, shape in shapes.items()}, tokens, tokens)
    plans = find_plan(program, hardware="dgx-h100", devices=8, batch=16, microbatch=2, zero=0, pp=1, tp=1,
                      recompute="none", simulations=1)
    assert {plan.settings["ep"] for plan in plans} == {1, 2, 4}
    split = next(plan for plan in plans if plan.settings["ep"] == 4)
    weights = [value for value in split.step.function.inputs if value.name in ("p.up", "p.down")]
    assert [str(value.layout) for value in weights] == ["TensorSharding('ep', None, None)"] * 2
    assert Task.simulate(plans.task, split.settings).makespan_seconds == pytest.approx(split.seconds, rel=1e-12)
    with pytest.raises(NoPlanFits, match="ep does not divide the experts"):
        _ = find_plan(program, hardware="dgx-h100", devices=8, batch=16, ep=8).best


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("arguments", "message"), [
    ({"batch": 0}, "batch must be an integer of at least 1, got 0"),
    ({"devices": None}, "say how many devices of dgx-h100 there are: devices=64"),
    ({"hardware": "dgx-h100:2", "devices": 8}, "dgx-h100:2 has 16 devices, and 8 are asked for"),
    ({"devices": 0}, "devices must be an integer of at least 1, got 0"),
    ({"hardware": "tpu-v4", "devices": 65}, "tpu-v4 has 64 devices, fewer than 65"),
    ({"memory": "72 apples"}, "memory must be a number of bytes, or a text such as 72GB"),
    ({"memory": "72"}, "memory must have a unit, such as 72GB; got '72', which is bytes"),
    ({"memory": 0}, "memory must be above 0 bytes"),
    ({"simulations": -1}, "simulations must be an integer of at least 0"),
    ({"figures": -1}, "figures must be an integer of at least 0, got -1"),
    ({"tpp": 2}, "a plan has no setting 'tpp'; did you mean 'tp'?"),
    ({"fsdp": "8x8"}, "fsdp is the number of devices that share the weights, as fsdp=64; got '8x8'"),
    ({"hsdp": 8}, "hsdp is REPLICASxDEVICES: hsdp=8x4 is 8 replicas, each on 4 devices that share its weights; got 8"),
    ({"fsdp": 2, "dp": 2}, "fsdp=2 says dp, too; leave one of them out"),
    ({"exchange": "ring"}, "exchange must be one of all_gather, p2p, a2a, a2a[+]p2p, got 'ring'"),
    ({"fsdpp": 2}, "a plan has no setting 'fsdpp'; did you mean 'fsdp'?"),
    ({"tp": 0}, "tp must be an integer of at least 1, got 0"),
    ({"tp": []}, "tp must have at least one value"),
    ({"zero": 4}, "zero must be 0, 1, 2 or 3, got 4"),
    ({"sp": 2}, "sp must be True or False, got 2"),
    ({"schedule": "inference"}, "schedule must be one that trains the whole model"),
    ({"order": "pp dp"}, "order must name pp, dp, ep, cp, tp, outermost first"),
    ({"recompute": "some"}, "recompute must be none or selective or full, got 'some'"),
    ({"model": models.mlp((6, 8, 3), 4)}, "must have the symbol B for the rows of its batch"),
])
def test_what_cannot_be_is_refused(arguments: dict, message: str) -> None:
    given = {"model": SPEC, "hardware": "dgx-h100", "devices": 2, "batch": 4} | arguments
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        find_plan(given.pop("model"), **given)


@pytest.mark.slow
def test_collectives_beside_their_products_are_a_setting() -> None:
    whole, cut = find_plan(SPEC, hardware="dgx-h100", devices=2, batch=4, tp=2, zero=0, tp_overlap=[0, 1], **FEW)
    if "tp_overlap" in whole.split:
        whole, cut = cut, whole
    assert "tp_overlap" in str(cut.strategy) and "tp_overlap" not in str(whole.strategy)
    for plan in (cut, whole):       # compute in a row is added first, and then to the rest: a sum may be rounded otherwise
        assert plan.seconds == pytest.approx(plan.simulate().makespan_seconds, rel=1e-14)
    assert cut.seconds != pytest.approx(whole.seconds, rel=1e-3)
    none = find_plan(SPEC, hardware="dgx-h100", devices=2, batch=4, tp=2, sp=False, tp_overlap=True, **FEW)
    assert not len(none) and none.refused["tp_overlap needs sequence parallelism, sp"].count
