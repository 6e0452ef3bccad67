"""Published runs beside their predictions: what is fitted, what is held out, and how far off each part is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from parallelism.hardware import fitted_on
from vcluster.__main__ import main
from vcluster.calibration import published
from vcluster.calibration.parameters import parameter, with_parameter
from vcluster.calibration.published import hardware_of, refitted, reported
from vcluster.calibration.published_report import Comparison, Line, Report
from vcluster.calibration.published_tables import (
    ALL_REDUCE,
    BACKWARD,
    FORWARD,
    MEMORY,
    STEP,
    TRAINING,
    Measured,
    Table,
    tables,
)
from vcluster.cli.command_line import WrongWords

NCCL, KORTHIKANTI = Table.of("nccl-a100"), Table.of("korthikanti-2022")
LARGE = 32 * 2**20


@pytest.mark.slow
def test_the_tables_say_where_they_are_from_and_what_was_fitted_to_them():
    assert tables() == ("experts-h100", "fsdp-a100", "fsdp-h100", "korthikanti-2022", "maxtext-h100", "megatron-h100",
                        "nccl-a100", "nemo-h100", "zero-bubble-2023")
    assert not Table.of("zero-bubble-2023").parameters and "zero-bubble-2023" not in fitted_on("megatron-a100")
    for table in (NCCL, KORTHIKANTI):
        assert table.source and table.name in fitted_on(table.stack)
    steps = [row for row in KORTHIKANTI.rows if row.part == STEP]
    assert len(steps) == 9 and [row.devices for row in steps if row not in KORTHIKANTI.fitted_rows] == [2240]
    assert len([row for row in KORTHIKANTI.rows if row.part in (FORWARD, BACKWARD)]) == 10
    with pytest.raises(ValueError, match=f"no published table 'korth'; there is {', '.join(tables())}"):
        Table.of("korth")


def test_all_reduce_fitted_on_two_and_eight_devices_is_told_within_twelve_percent_on_four():
    report = reported(NCCL)
    held_out = [line for line in report.lines if line.held_out]
    assert {line.row.devices for line in held_out} == {4} and len(held_out) == 11
    assert {line.row.devices for line in report.lines if not line.held_out} == {2, 8}
    assert max(abs(line.error) for line in held_out if line.row.nbytes >= LARGE) < 0.12
    assert max(abs(line.error) for line in report.lines if line.row.nbytes >= LARGE) < 0.125


@pytest.mark.slow
def test_the_constants_of_the_links_are_those_that_a_refit_finds():
    for name, value in refitted(NCCL).parameters.items():
        assert value == pytest.approx(reported(NCCL).parameters[name], rel=2e-3)


@pytest.mark.slow
def test_rows_that_were_held_out_are_told_beside_the_best_fit_of_the_same_form():
    few = replace(NCCL, rows=tuple(row for row in NCCL.rows if row.nbytes in (2**20, 2**28)))
    again = refitted(few)
    assert len(again.best) == len(few.rows) and again.without_model == ()
    text = str(again)
    *_, means = text[:text.index("\n\n ", text.index("best of this form"))].splitlines()
    assert "% where fitted, " in means and "% held out, " in means
    assert text.count("held out") == 2 + 1 and text.count("fitted") == 4 + 1 and "best of this form" in text
    squares = [sum(line.error ** 2 for line in lines) for lines in (again.lines, again.best)]
    assert squares[1] < squares[0] < 0.2


def test_what_a_stack_was_fitted_on_cannot_be_told_as_held_out():
    row = KORTHIKANTI.rows[0]
    with pytest.raises(ValueError, match="megatron-a100 was fitted on korthikanti-2022: its rows are not held out"):
        Report(KORTHIKANTI, "megatron-a100", (Line(row, row.measured, True),), {})
    Report(KORTHIKANTI, "megatron-h100", (Line(row, row.measured, True),), {})


def test_a_refit_finds_the_constants_that_made_the_numbers_and_leaves_out_one_model_at_a_time(monkeypatch):
    """Seconds of a made-up law; the memory of one model takes longer than that law says."""
    def predicted(row, hardware):
        flops, moved = dict(row.flags)["work"]
        return flops / hardware.flops_efficiency + moved / hardware.memory_efficiency

    monkeypatch.setattr(Measured, "predicted", predicted)
    rows = tuple(
        Measured(STEP, model, "", 8, flops / 0.7 + extra * moved / 0.6, (("work", (flops, moved)),))
        for model, extra, works in (("a", 1, ((3, 1), (2, 2))), ("b", 1, ((9, 1), (1, 4))), ("c", 1.5, ((4, 4),)))
        for flops, moved in works)
    table = replace(KORTHIKANTI, rows=rows)
    report = refitted(replace(table, rows=rows[:4]))
    np.testing.assert_allclose(list(report.parameters.values()), (0.7, 0.6), rtol=1e-4)
    assert max(abs(line.error) for line in (*report.lines, *report.without_model)) < 1e-4
    apart = {line.row: line for line in refitted(table).without_model}
    assert len(apart) == 5 and apart[rows[4]].held_out
    assert apart[rows[4]].predicted == pytest.approx(4 / 0.7 + 4 / 0.6, rel=1e-3)
    assert all(line.held_out is False for line in refitted(table).lines)


def of_a_law(monkeypatch, measured):
    """A table of four runs of one model on more and more devices, and of one of another; what was predicted, with what."""
    asked = []

    def predicted(row, hardware):
        asked.append((row.published.number, parameter(hardware, "memory_efficiency")))
        return row.published.flops * 1e-15 / hardware.memory_efficiency

    monkeypatch.setattr(Measured, "predicted", predicted)
    runs = [row for row in Table.of("megatron-h100").rows if row.model in ("nemotron-15b", "gpt3-175b")][:6]
    runs = [row for row in runs if row.model == "nemotron-15b" or row.devices == 128]
    rows = tuple(replace(row, measured=row.published.flops * 1e-15 / measured, held_out=False) for row in runs)
    table = replace(FSDP, rows=rows, parameters=("memory_efficiency",), stack="megatron-core-h100", name="of a law")
    return table, asked


def test_runs_with_more_replicas_have_the_slopes_of_the_smallest_one(monkeypatch):
    table, asked = of_a_law(monkeypatch, measured=0.5)
    report = refitted(table)
    kinds = {row.published.alike for row in table.rows}
    assert len(kinds) == 2 < len(table.rows)
    assert len(asked) == len(table.rows) + len(kinds) + len(table.rows)  # at the start, slopes, and the fit
    smallest = {min(row.devices for row in table.rows if row.published.alike == kind) for kind in kinds}
    start = parameter(hardware_of(table, table.rows[0]), "memory_efficiency")
    moved = {number for number, value in asked[:len(table.rows) + len(kinds)] if value != start}
    assert {row.devices for row in table.rows if row.published.number in moved} == smallest
    assert report.parameters["memory_efficiency"] == pytest.approx(0.5, rel=1e-6)
    assert max(abs(line.error) for line in report.lines) < 1e-6


def test_a_fit_that_is_the_stack_as_it_is_is_not_predicted_again(monkeypatch):
    table, asked = of_a_law(monkeypatch, measured=0.917537)
    report = refitted(table)
    assert len(asked) == len(table.rows) + 2
    assert report.parameters == {"memory_efficiency": 0.917537} and max(abs(line.error) for line in report.lines) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("what", [
    "no recomputation", *(pytest.param(other, marks=pytest.mark.slow) for other in (
        "sequence parallel", "full recomputation", "selective recomputation", "selective, sequence parallel"))])
def test_a_layer_takes_what_was_measured(what):
    rows = [row for row in KORTHIKANTI.rows if row.part in (FORWARD, BACKWARD) and row.what == what]
    assert len(rows) == 2
    for row in rows:
        assert row.predicted(hardware_of(KORTHIKANTI, row)) == pytest.approx(row.measured, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["28.3B", *(pytest.param(other, marks=pytest.mark.slow) for other in (
    "1.5B", "6.2B", "14.6B"))])
def test_layers_that_nothing_was_fitted_to_take_in_all_what_was_measured(model):
    """Forward and backward together; each by itself is up to 15 % off, in opposite directions."""
    table = Table.of("zero-bubble-2023")
    report = refitted(replace(table, rows=tuple(row for row in table.rows if row.model == model)))
    assert len(report.lines) == 2 and all(line.held_out for line in report.lines) and not report.without_model
    whole = sum(line.predicted for line in report.lines) / sum(line.row.measured for line in report.lines)
    assert whole == pytest.approx(1, abs=0.06) and max(abs(line.error) for line in report.lines) < 0.16
    assert str(report).count("held out") == 2 and "nothing is fitted to this table" in str(report)


def test_the_mean_of_fitted_rows_is_told_apart_from_those_held_out():
    rows = [row for row in KORTHIKANTI.rows if row.part == STEP][:3]
    lines = [Line(row, row.measured * (1 + error), held_out=held_out)
             for row, error, held_out in zip(rows, (0.01, -0.03, 0.08), (False, False, True), strict=True)]
    table = replace(KORTHIKANTI, name="another", rows=tuple(rows))
    told = [str(Report(table, "megatron-a100", each, {})) for each in (tuple(lines), tuple(lines[:2]))]
    assert "step: mean error 2.0% where fitted, 8.0% held out, 4.0% in all\n" in told[0]
    assert "step: mean error 2.0%\n" in told[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_steps_and_memory_are_as_published():
    report = reported(replace(KORTHIKANTI, rows=tuple(
        row for row in KORTHIKANTI.rows if row.part in (STEP, MEMORY) and row.model in ("22B", "175B"))))
    assert report.mean(STEP) < 0.036 and report.mean(MEMORY) < 0.05


def test_the_command_prints_the_table_and_refuses_another(capsys, monkeypatch):
    monkeypatch.setattr(published, "refitted", lambda table, told: (told("one", 1, 2), reported(
        replace(table, rows=table.rows[:2])))[1])
    assert main(["calibrate", "--published", "nccl-a100"]) == 0
    printed = capsys.readouterr()
    assert "1 MiB on 2" in printed.out and f"{ALL_REDUCE}: mean error" in printed.out and printed.err == ""
    with pytest.raises(WrongWords, match="no published table 'nccl'"):
        main(["calibrate", "--published", "nccl"])


# -- runs of training --------------------------------------------------------------------------------------------------

FSDP = Table.of("fsdp-h100")


def test_every_second_run_of_training_is_only_tested():
    for table in map(Table.of, ("fsdp-h100", "fsdp-a100", "megatron-h100", "nemo-h100")):
        assert {row.part for row in table.rows} == {TRAINING} and table.name in fitted_on(table.stack)
        tested = [row for row in table.rows if row not in table.fitted_rows]
        assert len(tested) == len(table.rows) // 2
        assert len({row.published.number for row in table.rows}) == len(table.rows)
        report = Report(table, table.stack, tuple(Line(row, row.measured, row.held_out) for row in table.rows), {})
        apart = [each for each in report.comparisons() if each.name.endswith("held out")]
        assert str(report).count("held out") == len(tested) + 1 + len(apart)
        wrong = tuple(Line(row, row.measured, held_out=True) for row in table.fitted_rows[:1])
        with pytest.raises(ValueError, match="its rows are not held out"):
            Report(table, table.stack, wrong, {})


def test_a_table_may_be_of_one_software_in_a_set():
    core, jax = Table.of("megatron-h100"), Table.of("maxtext-h100")
    for table, software, rows in ((core, "NeMo", 36), (jax, "MaxText", 10)):
        assert {row.published.columns["software"] for row in table.rows} == {software} and len(table.rows) == rows
        assert {row.published.columns["set"] for row in table.rows} == {"dgxc-h100", "dgxc-h100-fp8"}
    numbers = {row.published.number for row in (*core.rows, *jax.rows)}
    assert len(numbers) == 46 and len([row for row in jax.rows if row.held_out]) == 4


def test_runs_of_training_stand_beside_one_constant():
    rows = FSDP.rows[:4]
    lines = tuple(Line(row, row.measured * factor, held_out=True)
                  for row, factor in zip(rows, (1.02, 0.96, 1.0, 1.04), strict=True))
    told = Comparison("set", lines)
    mfu = [line.work / row.measured for line, row in zip(lines, rows, strict=True)]
    assert told.error == pytest.approx(0.025)
    assert told.constant_errors == pytest.approx([each / np.median(mfu) - 1 for each in mfu])
    assert Comparison("as measured", tuple(replace(line, predicted=line.row.measured) for line in lines)).order == (
        pytest.approx(1.0))
    turned = tuple(replace(line, predicted=line.work**2 / line.row.measured) for line in lines)
    assert Comparison("the other way round", turned).order == pytest.approx(-1.0)
    assert str(told).startswith("set, 4 runs: mean error 2.5%, of one constant MFU ")


@pytest.mark.parametrize(("name", "value"), [
    ("flops_efficiency", 0.5), ("kernels.attention.efficiency", 0.3), ("kernels.gelu.times", 2.0),
    ("flops_efficiencies.float8", 0.5), ("products.grouped", 0.9), ("products.accumulated", 0.5),
    ("reached.infiniband.bus_bytes_per_second", 4e10), ("bus_bytes_per_second", 3e11), ("collective_share", 0.25)])
def test_a_parameter_is_read_and_changed_by_its_name(name, value):
    before = hardware_of(FSDP, FSDP.rows[0])
    after = with_parameter(before, name, value)
    assert parameter(after, name) == value != parameter(before, name)
    assert with_parameter(after, name, parameter(before, name)) == before


def test_attention_rates_of_other_widths_change_in_proportion():
    before = hardware_of(Table.of("megatron-h100"), Table.of("megatron-h100").rows[0])
    after = with_parameter(before, "kernels.attention&attention_gradient.efficiency", 0.558)
    for kernel in ("attention", "attention_gradient"):
        rates = [(rate.width, rate.efficiency) for rate in before.kernels[kernel].rates]
        assert [width for width, _ in rates] == [128, 128, 64, 64] and rates[0][1] == rates[1][1] == 0.372
        assert [rate.efficiency for rate in after.kernels[kernel].rates] == pytest.approx([1.5 * each for _, each in rates])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value", "least"), [
    ("kernels.dispatch.host_seconds", 3e-3, 1.05), ("products.accumulated", 0.9, 1.003)])
def test_what_predictions_are_linear_in_is_found_from_runs_that_have_it(name, value, least):
    table = Table.of("experts-h100")
    row = table.rows[0]
    took = row.predicted(hardware_of(table, row, {name: value}))
    assert took > least * row.predicted(hardware_of(table, row))
    few = replace(table, rows=(replace(row, measured=took),), parameters=(name,))
    assert refitted(few).parameters[name] == pytest.approx(value, rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "most"), [("fsdp-h100", 0.04), ("fsdp-a100", 0.05)])
def test_runs_of_training_that_were_held_out_are_told_better_than_by_a_constant(name, most):
    held_out = [each for each in reported(Table.of(name)).comparisons() if each.name.endswith("held out")]
    errors = [abs(line.error) for each in held_out for line in each.lines]
    assert float(np.mean(errors)) <= most
    for each in held_out:
        assert each.error < float(np.mean(np.abs(each.constant_errors)))


def test_runs_of_nemo_in_float8_have_its_recipe_and_others_scales_of_the_tensor_itself():
    rows = [row.published for name in ("megatron-h100", "nemo-h100", "experts-h100") for row in Table.of(name).rows]
    recipes = {(each.columns["software"], each.columns["precision"]): {
        (other.flags.fp8_recipe, other.flags.fp8_amax_history_len, other.flags.fp8_param_gather) for other in rows
        if (other.columns["software"], other.columns["precision"]) == (each.columns["software"], each.columns["precision"])}
        for each in rows}
    assert recipes == {
        ("NeMo", "bf16"): {(None, None, None)}, ("NeMo", "fp8"): {("delayed", 1024, True)},
        ("Megatron Bridge", "bf16"): {(None, None, None)}, ("Megatron Bridge", "fp8"): {("tensorwise", None, None)},
        ("Megatron Bridge", "fp8-cs"): {("tensorwise", None, None)}}
