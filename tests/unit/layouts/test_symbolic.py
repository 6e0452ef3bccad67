"""Programs laid out once with symbols for the numbers of devices, and what `localize` makes of numbers."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings, strategies as st
from transformed import transformer

from parallelism import Mesh, ir, models
from parallelism.execution.stage_code import StagePrograms
from parallelism.ir.passes import peak_bytes
from parallelism.layouts import localize, localize_symbolically
from parallelism.layouts.stages.laid_out_stages import laid_out_stages
from parallelism.transforms import SGD, Adam, Strategy, train_step

B, = ir.symbols("B")
MODELS = {
    "mlp": lambda: models.mlp((8, 16, 24, 8), B), "mixture": lambda: models.mixture(8, 8, 8, 4, 4, B, 8),
    "gpt": lambda: transformer(width=32, heads=8, vocabulary=16, sequence=8).function(B),
}
TEXTS = ["dp tp", "dp tp zero=2", "dp:outer dp zero=3", "precision=bf16 dp zero=1 tp recompute=*"]


@cache
def laid_out(model, text):
    step = Strategy.parse(text)(train_step(MODELS[model](), Adam(0.01), clip=1.0))
    layouts = [value.layout for value in step.values if value.layout]
    axes = sorted({axis for layout in layouts for axis in (*layout.axes, *layout.partial)})
    return step, localize_symbolically(step, axes)


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("model", MODELS)
def test_all_small_meshes_have_the_program_of_the_symbols(model, text):
    for sizes in product((1, 2, 4), repeat=2):
        check(model, text, *sizes)


@settings(max_examples=1)
@given(st.sampled_from(["mlp", "gpt"]), st.sampled_from(TEXTS), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_a_mesh_has_the_program_of_the_symbols(model, text, outer, inner):
    check(model, text, outer, inner)


def check(model, text, outer, inner):
    step, symbolic = laid_out(model, text)
    mesh = Mesh(**dict(zip(symbolic.axes, (outer, inner), strict=True)))
    localized = localize(step.specialize(B=16), mesh)
    shapes = {tuple(value.type for value in localized.program(rank).values) for rank, _ in localized.classes}
    if len(shapes) > 1:
        with pytest.raises(ValueError, match="is not split evenly over the"):
            symbolic.on(mesh, B=16)
        return
    program = symbolic.on(mesh, B=16)
    numbered = localize(step, mesh).program().specialize(B=16)
    assert program == numbered and not program.symbols
    assert peak_bytes(program) == peak_bytes(numbered) and program.flops == numbered.flops


def test_flops_and_bytes_are_expressions_of_the_numbers_of_devices():
    loss = ir.gradient(models.mlp((8, 16, 8), 16))
    symbolic = localize_symbolically(Strategy.parse("dp tp")(STEP), ["dp", "tp"])
    program = symbolic.program()
    assert program.symbols == {"dp", "tp"} and symbolic.program(["tp"]).symbols == {"dp"}
    products = [op for op in program.ops if op.kind == "matmul"]
    assert str(sum(op.flops for op in products)) == f"{sum(op.flops for op in loss.ops if op.kind == 'matmul')}/dp/tp"


def test_the_functions_of_a_stage_are_laid_out_on_symbols_one_by_one():
    tp, = ir.symbols("tp")
    step = Strategy.parse("tp sp pp 1f1b:2")(train_step(MODELS["gpt"](), SGD(0.1)))
    stages = step.stages(2)
    for n in (1, 4):
        mesh = Mesh(tp=n)
        numbered, laid = laid_out_stages(stages, mesh), laid_out_stages(stages, {"tp": tp})
        for functions, symbolic in zip(numbered.functions, laid.functions, strict=True):
            programs = StagePrograms(functions, "B", 8, mesh)
            for kind in "FIW":
                function = {"F": symbolic.forward, "I": symbolic.backward_input, "W": symbolic.backward_weights}[kind]
                numbers = {"B": 4, "B_whole": 8, "B_first": 0}
                known = {name: numbers[name] for name in numbers.keys() & function.symbols}
                found = localize_symbolically(function, ["tp"]).on(mesh, **known)
                expected = localize(programs.function(kind, (0, 4)), mesh).program()
                assert [(op.kind, op.attributes, op.outputs) for op in found.ops] == [
                    (op.kind, op.attributes, op.outputs) for op in expected.ops]


STEP = train_step(models.mlp((8, 16, 8), 16), SGD(1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("build", "error", "message"), [
    (lambda: localize_symbolically(Strategy.parse("pp 1f1b:2")(train_step(MODELS["mlp"](), SGD(1))), ["dp"]), TypeError,
     "got Step; the ops of a pipeline's stage depend on the number of stages, so that number cannot be a symbol"),
    (lambda: localize_symbolically(Strategy.parse("dp:B")(train_step(MODELS["mlp"](), SGD(1))), ["B"]), ValueError,
     "@mlp.step has a symbol B, so it cannot be the number of devices along the axis 'B'"),
    (lambda: localize_symbolically(Strategy.parse("dp")(STEP), ["tp"]), ValueError, "names axis 'dp', but the axes of"),
    (lambda: localize_symbolically(
        Strategy.parse("dp tp sp zero=3")(train_step(MODELS["mlp"](), SGD(1))), ["dp", "tp"]), ValueError,
     "needs numbers in place of symbols"),
    (lambda: localize_symbolically(Strategy.parse("dp")(STEP), ["dp"]).on(Mesh(dp=3)), ValueError,
     r"a dim of 16 of @mlp.step is not split evenly over the 3 devices along dp of Mesh\(dp=3\): localize the program"),
    (lambda: localize_symbolically(Strategy.parse("dp tp")(STEP), ["dp", "tp"]).on(Mesh(tp=2, dp=2)), ValueError,
     "is laid out on the axes dp, tp, got Mesh"),
    (lambda: localize_symbolically(Strategy.parse("dp")(STEP), ["dp"]).on(Mesh(dp=2), B=4), ValueError, "no symbol B"),
])
def test_what_cannot_be_symbolic_says_so(build, error, message):
    with pytest.raises(error, match=message):
        build()
