"""A GPU measured into a stack: constants, file, models that are held out; with a GPU that need not exist."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from dataclasses import replace
from math import prod
from pathlib import Path
from unittest.mock import patch

import pytest
from fake_gpu import H100, FakeGpu

from parallelism import Hardware
from parallelism.cost import Costs
from parallelism.hardware import (
    AttentionRate,
    HostLink,
    Kernel,
    Products,
    Reached,
    read_stack,
    sized_hardware,
)
from vcluster.__main__ import main
from vcluster.calibration.gpu import calibration
from vcluster.calibration.gpu.bases import base_of, one_node, preset_of
from vcluster.calibration.gpu.calibration import calibrate, on_file
from vcluster.calibration.gpu.fits import Fit, fit, fitted_products
from vcluster.calibration.gpu.items import ATTENTION, COPIES, ELEMENTWISE, LAYERS, PRODUCTS, Item, items
from vcluster.calibration.gpu.kept import again, kept, kept_names
from vcluster.calibration.gpu.measuring import (
    INTERRUPTED,
    NOT_MEASURED,
    OUT_OF_TIME,
    Budget,
    Tables,
    measure_all,
)
from vcluster.calibration.gpu.models import MODELS, QUICK_MODELS
from vcluster.calibration.gpu.stack_file import write_stack
from vcluster.calibration.gpu.training import HeldOut, mean_error, run_of, table
from vcluster.cli.command_line import WrongWords

MADE = replace(
    Hardware.preset("dgx-h100:1"), flops_efficiency=0.73, flops_efficiencies={"bfloat16": 0.73, "float8": 0.58},
    products=Products(132, half_depth=190.0, half_intensity=6.5), memory_efficiency=0.81, memory_ramp_seconds=3e-6,
    kernel_launch_seconds=1.7e-6, flops_ramp_seconds=0.0, host=HostLink(9e-6, 5.4e10), kernels={
        "layer_norm": Kernel(2.0, 1.4), "rms_norm_gradient": Kernel(3.0, 2.3), "swiglu_gradient": Kernel(times=1.7),
        "rotary": Kernel(6.0, 8.5), "convert": Kernel(times=1.25), "max": Kernel(times=1.6),
        "exponential_sums": Kernel(times=1.6),
        "attention": Kernel(rates=(AttentionRate(64, True, 0.4, 300.0), AttentionRate(128, True, 0.6, 500.0))),
        "attention_gradient": Kernel(rates=(AttentionRate(64, True, 0.3, 900.0), AttentionRate(128, True, 0.5, 700.0))),
    })
"""What the fake GPU computes with, and the fit must find."""
FEW = QUICK_MODELS[:1]


def silent(words: str) -> None:
    pass


def without_training(gpu: FakeGpu, path: Path, devices: int = 1) -> Fit:
    """The constants of a GPU, written as a stack."""
    tables = Tables(gpu.machine())
    measure_all(tables, items(devices=devices), gpu.measure, Budget(1e9), say=silent)
    found = fit(tables)
    write_stack(path, found, tables.machine, "tables.json")
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A whole calibration, and the path of its stack."""
    path = tmp_path_factory.mktemp("gpu") / "ours.toml"
    with patch.object(calibration, "MODELS", FEW):
        return calibrate(FakeGpu(MADE), path, say=silent), path


@pytest.mark.slow
def test_the_fit_finds_the_constants_that_made_the_measurements(measured):
    found, _ = measured
    hardware = found.found.hardware
    assert found.found.preset == "dgx-h100" and found.found.known
    for field in ("flops_efficiency", "memory_efficiency", "memory_ramp_seconds", "kernel_launch_seconds"):
        assert getattr(hardware, field) == pytest.approx(getattr(MADE, field), rel=1e-3), field
    assert hardware.efficiency("float8") == pytest.approx(0.58, rel=1e-3)
    assert (hardware.products.half_depth, hardware.products.half_intensity) == pytest.approx((190.0, 6.5), rel=1e-2)
    assert hardware.host.latency_seconds == pytest.approx(9e-6, rel=0.02)
    assert hardware.host.bytes_per_second == pytest.approx(5.4e10, rel=0.01)
    assert hardware.fused == "elementwise" and hardware.issue_seconds == 0
    assert found.tables.notes["issue_seconds_of_an_op"] > 0         # the host of a GPU issues ahead


@pytest.mark.slow
def test_the_fit_finds_the_constants_of_each_kernel(measured):
    found, path = measured
    for kernels in (found.found.hardware.kernels, Hardware.of(f"dgx-h100:1+{path}").kernels):
        for name, made in MADE.kernels.items():
            told = kernels[name]
            if made.rates:
                causal = [rate for rate in told.rates if rate.causal]
                assert [rate.width for rate in causal] == [64, 128]
                for rate, other in zip(causal, made.rates, strict=True):
                    assert rate.efficiency == pytest.approx(other.efficiency, rel=0.01)
                    assert rate.half_length == pytest.approx(other.half_length, rel=0.03)
            else:
                assert (told.launches, told.times) == pytest.approx((made.launches, made.times), rel=0.03), name
        assert kernels["gelu"].times == pytest.approx(1, rel=0.01)          # it takes as long as its bytes
        assert kernels["split"] == kernels["scalars"] == Kernel(0, 0)
        assert kernels["multiply+add+divide+sqrt+..."].launches == 0


@pytest.mark.slow
def test_the_file_is_a_stack_whose_every_number_says_that_it_was_measured_on_what_and_when(measured):
    found, path = measured
    told = tomllib.loads(path.read_text())
    fields = {field for field in told if field not in (
        "name", "title", "fitted_on", "hardware", "measured", "sources", "kernels", "validation")}
    fields |= {f"kernels.{name}" for name in told["kernels"]}
    assert fields == {*told["sources"]} and told["name"] == "ours" and told["fitted_on"] == []
    assert {"flops_efficiency", "flops_efficiencies", "products", "host", "memory_efficiency"} < fields
    guessed = {field for field, source in told["sources"].items() if source.startswith("estimate: ")}
    assert guessed == {"kernels.split", "kernels.scalars"}
    for source in (source for field, source in told["sources"].items() if field not in guessed):
        assert source.startswith("measured: on NVIDIA H100 80GB HBM3, 2026-11-27, PyTorch 2.11.0, driver 580.1, by")
    (compared,) = told["validation"]
    assert compared == {"table": "ours.json", "what": "steps of training on one GPU", "rows": len(FEW), "held_out": True,
                        "mean_error": pytest.approx(mean_error(found.steps), rel=1e-5)}
    assert told["measured"]["tables"] == "ours.json" and told["hardware"] == "dgx-h100"
    read = Hardware.of(f"dgx-h100:1+{path}")
    for field, value in found.found.values.items():
        if isinstance(value, float):
            assert getattr(read, field) == pytest.approx(value, rel=1e-5)
    assert read.stack == "ours" and read.products.units == 132 and read.fused == "elementwise"
    assert read.flops_per_second == Hardware.preset("dgx-h100").flops_per_second
    assert read.sources["memory_efficiency"].startswith("ours, measured: on NVIDIA H100")


@pytest.mark.takes_seconds
def test_tables_hold_every_row_and_are_read_as_they_were_written(measured):
    found, path = measured
    told = Tables.load(path.with_suffix(".json"))
    assert {name: len(rows) for name, rows in told.rows.items()} == {
        name: len([item for item in items() if item.table == name]) for name in {item.table for item in items()}}
    assert told.machine == found.tables.machine and told.notes["preset"] == "dgx-h100"
    assert [note["held_out"] for note in told.notes["training"]] == [True] * len(FEW)
    # The decoder would read NaN and Infinity, too; no other program would.
    json.loads(path.with_suffix(".json").read_text(), parse_constant=pytest.fail)


@pytest.mark.takes_seconds
def test_a_stack_file_stands_behind_a_preset_as_a_stack_does(measured):
    _, path = measured
    assert sized_hardware(f"dgx-h100+{path}", 20).devices == 24
    assert sized_hardware(f"dgx-h100:2+{path}", 16).devices == 16
    assert Hardware.of(f"dgx-a100+{path}").flops_efficiency == pytest.approx(0.73, rel=1e-3)
    assert on_file("dgx-h100", path).devices == 8


@pytest.mark.slow
@pytest.mark.parametrize("words", [
    "simulate gpt --num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 512 --bf16 "
    "--global-batch-size 4 --devices 2",
    "plan gpt --num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 512 --bf16 "
    "--global-batch-size 4 --devices 2 --fix tp=1 --fix pp=1 --fix zero=0 --fix microbatch=2 --simulations 0",
])
def test_simulate_and_plan_take_the_file(words, measured, capsys):
    _, path = measured
    assert main([*words.split(), "--hardware", f"dgx-h100+{path}", "--json"]) == 0
    assert "ours" in capsys.readouterr().out


def test_simulated_steps_are_told_beside_measured_ones_as_held_out(measured):
    found, _ = measured
    text = str(found)
    assert text.count("held out") == len(FEW) + 1 and "constant MFU" in text and "which favours it" in text
    assert [step.name for step in found.steps] == [model.name for model in FEW]
    assert "reached at best" in text and "dgx-h100" in text


@pytest.mark.slow
def test_no_step_is_among_what_constants_are_fitted_to(measured):
    found, _ = measured
    slower = FakeGpu(MADE, step_seconds=7.0)
    again = Tables(slower.machine(), {name: rows for name, rows in found.tables.rows.items() if name != LAYERS})
    assert fit(again).values == found.found.values
    assert not {"training", "steps"} & {*found.tables.rows}


def test_the_constant_beside_predictions_is_the_median_utilization_of_these_steps():
    rows = [HeldOut("a", 1.0, 1.1, 4.0, 10.0), HeldOut("b", 2.0, 1.8, 6.0, 10.0), HeldOut("c", 4.0, 5.0, 8.0, 10.0)]
    told = table(rows)
    assert [row.mfu for row in rows] == pytest.approx([0.4, 0.3, 0.2])
    assert "mean error 15.0% held out; of one constant MFU 22.2%. The constant is 30.0%" in told
    assert table([]) == "no step was measured"


@pytest.mark.parametrize("model", [*MODELS, *QUICK_MODELS])
def test_the_models_have_the_parameters_that_the_simulated_ones_have(model):
    run = run_of(model)
    counted = sum(prod(shape) for shape in model.shapes().values())
    assert counted == run.model.parameters
    assert (run.batch, run.microbatches) == (model.microbatch * model.microbatches, model.microbatches)


@pytest.mark.slow
def test_attention_is_told_as_it_is_for_seconds_on_end_and_products_as_they_are_alone(measured, tmp_path):
    found, _ = measured
    hot = without_training(FakeGpu(MADE, slower=1.25), tmp_path / "hot.toml")
    assert hot.hardware.flops_efficiency == pytest.approx(0.73, rel=1e-3)
    assert hot.hardware.products == found.found.hardware.products
    (rate, *_), (other, *_) = (each.kernels["attention"].rates for each in (hot.hardware, found.found.hardware))
    assert rate.efficiency == pytest.approx(other.efficiency / 1.25, rel=1e-3) and rate.half_length == other.half_length
    assert hot.hardware.kernels["layer_norm"] == found.found.hardware.kernels["layer_norm"]
    assert hot.notes["kernels.attention"].endswith("times 0.800: alone over the same for seconds on end")


def test_parts_without_a_constant_are_told_beside_the_one_rate_that_there_is(measured):
    found, path = measured
    notes = Tables.load(path.with_suffix(".json")).notes
    factors = {row["op"]: row for row in notes["elementwise_factors"]}
    assert factors["gelu"]["forward"] == pytest.approx(1, rel=1e-3)         # the fake GPU takes as long as its bytes
    assert factors["layer_norm"]["forward"] == pytest.approx(1.4, rel=0.05)
    assert factors["rms_norm"]["elements"] == 8192 * 4096 and "backward" not in factors["copy"]
    parts = notes["attention_parts_of_peak"]
    causal, whole = (next(row for row in parts if row["causal"] == kind) for kind in (True, False))
    assert causal["tokens"] == whole["tokens"] == 4096 and causal["head_width"] == 128
    assert causal["forward"] == pytest.approx(0.6 * 4096 / 4596, rel=0.02)
    assert causal["backward"] == pytest.approx(0.5 * 4096 / 4796, rel=0.02)
    assert whole["forward"] == pytest.approx(causal["forward"], rel=0.02)
    told = str(found)
    assert "flash, heads of 128, causal, 512 to 32768 tokens" in told and "takes for a parameter" in told


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_library_refuses_is_told_with_its_reason_and_the_rest_goes_on(tmp_path):
    def refuse(item: Item) -> None:
        if item.given.get("dtype") == "float8":
            raise RuntimeError("no float8\n  here")

    said: list[str] = []
    found = calibrate(FakeGpu(MADE, before=refuse), tmp_path / "x.toml", quick=True, say=said.append)
    refused = [row for row in found.tables.rows[PRODUCTS] if row["dtype"] == "float8"]
    assert [row[NOT_MEASURED] for row in refused] == ["RuntimeError: no float8 here"] * 3
    assert any(line.endswith("not measured: products: m=64 n=64 k=64 dtype=float8 layout=tn: RuntimeError: no float8 "
                             "here") for line in said)
    assert "float8" not in found.found.values["flops_efficiencies"] and found.found is not None


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_told_and_the_others_are_trained(tmp_path):
    class Small(FakeGpu):
        def step(self, model, steps):
            if model is QUICK_MODELS[0]:
                raise MemoryError("too large")
            return super().step(model, steps)

    found = calibrate(Small(MADE), tmp_path / "x.toml", quick=True, say=silent)
    assert [step.name for step in found.steps] == [model.name for model in QUICK_MODELS[1:]]
    assert found.tables.notes["training"][0]["not_measured"] == "MemoryError: too large"


def test_an_interrupt_makes_a_stack_of_what_was_measured(tmp_path):
    def interrupt(item: Item) -> None:
        if item.table == COPIES:
            raise KeyboardInterrupt

    said: list[str] = []
    gpu = FakeGpu(MADE, before=interrupt)
    found = calibrate(gpu, tmp_path / "x.toml", quick=True, say=said.append)
    assert found.tables.interrupted and found.found is not None and gpu.trained == []
    assert {row[NOT_MEASURED] for row in found.tables.rows[COPIES]} == {INTERRUPTED}
    assert Hardware.of(f"dgx-h100+{tmp_path / 'x.toml'}").stack == "x"
    assert any("interrupted: " in line and "of copies" in line for line in said)


def test_without_a_product_there_is_no_stack_and_the_tables_are_kept(tmp_path):
    def interrupt(item: Item) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "x.toml"
    found = calibrate(FakeGpu(MADE, before=interrupt), path, quick=True, say=silent)
    assert found.found is None and str(found).startswith("no stack: no product was measured")
    assert not path.exists() and Tables.load(path.with_suffix(".json")).rows.keys() >= {PRODUCTS, ELEMENTWISE}


def test_what_does_not_fit_into_the_time_is_left_out():
    passed = [0.0]
    budget, tables = Budget(10.0, lambda: passed[0]), Tables({})

    def measure(item: Item) -> dict[str, float]:
        passed[0] += 6.0
        return {"seconds": 1.0}

    three = tuple(Item(name, {"n": 1}) for name in ("a", "b", "c"))
    said: list[str] = []
    measure_all(tables, three, measure, budget, reserve=5.0, say=said.append)
    assert tables.rows == {"a": [{"n": 1, "seconds": 1.0}], "b": [{"n": 1, NOT_MEASURED: OUT_OF_TIME}],
                           "c": [{"n": 1, NOT_MEASURED: OUT_OF_TIME}]}
    assert said[-1].endswith("out of time: 1 of b, 1 of c left out")


# -- tables that are kept ----------------------------------------------------------------------------------------------


def test_kept_tables_are_of_a_gpu_with_a_preset_and_have_their_date():
    assert "h100" in kept_names()
    for name in kept_names():
        tables = kept(name)
        assert preset_of(tables.machine["gpu"]) and tables.machine["date"].startswith("20") and not tables.missing()
        assert len(tables.measured(ATTENTION)) > 40 and len(tables.measured(LAYERS)) > 40


@pytest.mark.slow
@pytest.mark.timeout(300)        # seconds alone; it simulates more than any other test here
@pytest.mark.parametrize(("name", "preset"), [("h100", "dgx-h100"), ("h200", "h200-node")])
def test_kept_tables_give_the_stack_behind_the_preset_which_beats_one_constant_utilization(name, preset, tmp_path, capsys):
    path = tmp_path / "kept.toml"
    assert main(["calibrate", "--gpu", "--tables", name, "--output", str(path)]) == 0
    told = capsys.readouterr().out
    trained = [note["name"] for note in kept(name).notes["training"]]
    assert told.count("held out") == len(trained) + 1 and all(each in told for each in trained)
    (errors,) = re.findall(r"mean error ([0-9.]+)% held out; of one constant MFU ([0-9.]+)%", told)
    assert float(errors[0]) < 7 and float(errors[0]) < float(errors[1]) / 2
    read = Hardware.of(f"{preset}+{path}")
    assert 0.5 < read.flops_efficiency <= 1 and 0.7 < read.memory_efficiency < 0.95
    assert re.match(r"kept, measured: on NVIDIA H[12]00.*, 2026-11-27, PyTorch 2.11.0", read.sources["products"])
    found, stack = tomllib.loads(path.read_text()), read_stack(f"pytorch-{name}")
    assert found["measured"]["tables"] == f"{name}.json" and stack["hardware"] == preset
    (compared,), (other,) = found["validation"], stack["validation"]
    assert compared["mean_error"] == pytest.approx(float(errors[0]) / 100, abs=1e-3) and compared["held_out"]
    assert other == {**compared, "mean_error": pytest.approx(compared["mean_error"], abs=5e-3)}
    for field in ("flops_efficiency", "memory_efficiency", "kernel_launch_seconds"):
        assert found[field] == pytest.approx(stack[field], rel=1e-2)
    assert {*found["kernels"]} == {*stack["kernels"]}
    for kernel, values in found["kernels"].items():
        assert values.get("times", 1) == pytest.approx(stack["kernels"][kernel].get("times", 1), rel=1e-2), kernel


@pytest.mark.slow
def test_tables_beside_a_stack_give_the_same_stack_again(measured, tmp_path):
    _, path = measured
    again(str(path.with_suffix(".json")), tmp_path / "ours.toml")
    one, other = (tomllib.loads(each.read_text()) for each in (path, tmp_path / "ours.toml"))
    assert one["products"]["half_depth"] == pytest.approx(other["products"]["half_depth"], rel=1e-3)
    assert one["flops_efficiency"] == pytest.approx(other["flops_efficiency"], rel=1e-3)
    assert {**one, "products": 0, "flops_efficiency": 0}.keys() == other.keys() and one["measured"] == other["measured"]


@pytest.mark.parametrize(("name", "told"), [
    ("h1000", "--tables: no measured tables 'h1000'; there is h100"),
    ("nowhere.json", "--tables: nowhere.json cannot be read: No such file or directory"),
    ("bad.json", "--tables: bad.json must be tables that calibrate --gpu wrote beside a stack, with machine, notes and "
                 "tables; got something else"),
    ("empty.json", "--tables: no product was measured; a stack needs some"),
])
def test_tables_that_are_none_are_told_in_a_line(name, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("[1]")
    Tables(H100).save(tmp_path / "empty.json")
    with pytest.raises(WrongWords) as caught:
        main(["calibrate", "--gpu", "--tables", name])
    assert str(caught.value).startswith(told)


# -- bases -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu", "preset"), [
    ("NVIDIA H100 80GB HBM3", "dgx-h100"), ("NVIDIA H100 PCIe", "h100-pcie-node"), ("NVIDIA H200", "h200-node"),
    ("NVIDIA A100-SXM4-40GB", "dgx-a100-40"), ("NVIDIA A100-SXM4-80GB", "dgx-a100"), ("NVIDIA B200", "b200-node"),
    ("NVIDIA A100 80GB PCIe", "a100-pcie-node"), ("NVIDIA L40S", "l40s-node"), ("NVIDIA GB200", "gb200-nvl72"),
    ("Tesla V100-SXM2-16GB", "dgx-1-v100-16"), ("Tesla V100-SXM2-32GB", "dgx-1-v100"), ("NVIDIA RTX 4090", None),
])
def test_a_gpu_is_known_by_the_name_that_its_driver_gives_it(gpu, preset):
    assert preset_of(gpu) == preset and (preset is None or preset in Hardware.presets())


@pytest.mark.slow
def test_a_gpu_without_a_preset_gets_the_rates_that_it_reaches(tmp_path):
    machine = {**H100, "gpu": "NVIDIA Other 1", "multiprocessors": None}
    made = replace(MADE, products=None, memory_ramp_seconds=0.0, flops_efficiencies={})
    path = tmp_path / "other.toml"
    found = without_training(FakeGpu(made, machine=machine), path)
    read = Hardware.of(f"laptop+{path}")
    assert (found.preset, found.known) == ("laptop", False)
    assert read.peak("bfloat16") * read.efficiency("bfloat16") == pytest.approx(0.73 * 989.5e12, rel=0.02)
    assert read.memory_bytes_per_second * read.memory_efficiency == pytest.approx(0.81 * 3.35e12, rel=0.02)
    assert read.memory_bytes == H100["memory_bytes"] and read.peak() == read.peak("float32")


def test_products_of_few_rows_are_fitted_to_on_no_gpu(measured):
    found, _ = measured
    rows = fitted_products(found.tables, "bfloat16")
    assert min(row["m"] for row in rows) >= 256 and len(rows) > 30
    assert len(found.tables.measured(PRODUCTS, of="decode")) == 36


def test_one_node_is_taken_of_clusters_and_all_of_a_slice():
    assert one_node(Hardware.preset("dgx-h100")).devices == 8
    assert one_node(Hardware.preset("laptop")) == Hardware.preset("laptop")
    with pytest.raises(ValueError, match="no product was measured; a stack needs some"):
        base_of(Tables({"gpu": "?"}))


@pytest.mark.slow
def test_several_gpus_are_told_by_the_base_the_step_and_the_rate_of_their_all_reduce(tmp_path):
    link = MADE.links[0]
    reached = Reached(3.8e11, 3.1e11, 2.2e-5, 4.4e-6)
    made = replace(MADE, links=(replace(link, reached=reached), *MADE.links[1:]))
    path = tmp_path / "eight.toml"
    without_training(FakeGpu(made), path, devices=8)
    read = Hardware.of(f"dgx-h100+{path}")
    for nbytes in (1 << 14, 1 << 20, 1 << 28):
        assert Costs(read).collective("all_reduce", nbytes, range(8)).seconds == pytest.approx(
            Costs(made).collective("all_reduce", nbytes, range(8)).seconds, rel=0.01)
    assert read.sources["links.nvlink.reached.bus_bytes_per_second"].startswith("eight, measured: on NVIDIA H100")


# -- files and words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "words"), [
    ("", "name is missing; a stack has name, title, sources, and constants of a hardware"),
    ('name = "a"\ntitle = "b"\nflops_eficiency = 0.5\n[sources]\n',
     "'flops_eficiency' is no field of a stack; did you mean 'flops_efficiency'?"),
    ('name = "a"\ntitle = "b"\nflops_efficiency = 1.5\n[sources]\n',
     "flops_efficiency must be a number, above 0 and at most 1; got 1.5"),
    ('name = "a"\ntitle = "b"\nproducts = 3\n[sources]\n', "products must be a table with units"),
    ('name = "a"\ntitle = "b"\n[host]\nlatency_seconds = 1\n[sources]\n', "host.bytes_per_second is missing"),
    ('name = "a"\ntitle = "b"\nreached = 1\n[sources]\n', "reached must be a table with the names of links; got 1"),
    ('name = "a"\ntitle = "b"\nsources = 1\n', "sources must be a table of texts; got 1"),
    ("name = ", "must be TOML; got"),
])
def test_what_is_wrong_with_a_stack_file_is_told(text, words, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.toml: ") as caught:
        Hardware.of(f"dgx-h100+{path}")
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_stack_file_alone_is_no_hardware(measured):
    _, path = measured
    with pytest.raises(ValueError, match=rf"ours\.toml is a stack and .* behind one, as dgx-h100\+{path}"):
        Hardware.of(str(path))
    with pytest.raises(ValueError, match=r"nowhere\.toml: cannot be read"):
        Hardware.of("dgx-h100+nowhere.toml")
    with pytest.raises(ValueError, match=r"dgx-h10\+ours\.toml: cannot be read"):
        Hardware.of("dgx-h10+ours.toml")


@pytest.mark.parametrize(("words", "told"), [
    ("--gpu", "--gpu needs --output FILE.toml, the stack to write; got None"),
    ("--gpu --output a.json", "--gpu needs --output FILE.toml, the stack to write; got a.json"),
    ("--quick", "--quick is an option of --gpu"),
    ("--output a.toml", "--output is an option of --gpu"),
    ("--gpu-device cpu", "--gpu-device is an option of --gpu"),
])
def test_words_that_do_not_go_together_are_refused(words, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WrongWords, match=f"^{told}$"):
        main(["calibrate", *words.split()])
    assert not any(tmp_path.iterdir())


def test_without_pytorch_one_line_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(WrongWords, match=r"calibrate --gpu measures through PyTorch, which is not installed here: "
                                         r"python -m pip install torch, or vcluster\[gpu\]"):
        main(["calibrate", "--gpu", "--output", str(tmp_path / "a.toml")])
    assert not any(tmp_path.iterdir())


def test_the_most_needed_is_measured_first_and_what_nothing_is_fitted_to_last():
    names = [*dict.fromkeys(item.table for item in items())]
    assert names[:3] == ["launches", "products", "elementwise"]
    assert {*names[-len(calibration.BESIDES):]} == {*calibration.BESIDES}
    assert len({str(item) for item in items()}) == len(items())
    assert next(item.table for item in items(devices=4)) == "collectives"
