"""Stacks: what a software reaches, on top of a preset; each number says where it is from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelism import Hardware, models
from parallelism.hardware import (
    MARKS,
    HardwareFileError,
    Software,
    Validation,
    compared_in,
    fitted_on,
    mfu_remark,
    on_stack,
    read_stack,
    sized_hardware,
    stack_names,
    usual_error,
    validation_json,
    validation_text,
    with_usual_stack,
)
from vcluster.calibration.published_tables import Table
from vcluster.cli.megatron_words import searched_hardware


def test_the_stacks_are_these():
    assert stack_names() == (
        "maxtext-h100", "megatron-a100", "megatron-core-b200", "megatron-core-h100", "megatron-h100", "nemo-2024-h100",
        "numpy-host",
        "pytorch-eager-v100", "pytorch-h100", "pytorch-h200", "tensorrt-llm-a100", "tensorrt-llm-b200",
        "tensorrt-llm-h100", "tensorrt-llm-h200", "torch-fsdp-a100", "torch-fsdp-h100")


@pytest.mark.parametrize("name", stack_names())
def test_every_number_of_a_stack_says_what_it_is(name):
    table = read_stack(name)
    numbers = {field for field in table if field not in (
        "name", "title", "fitted_on", "hardware", "default", "measured", "sources", "reached", "kernels", "validation")}
    numbers |= {f"kernels.{kernel}" for kernel in table.get("kernels", {})}
    numbers |= {f"reached.{link}.{field}" for link, fields in table.get("reached", {}).items() for field in fields}
    assert table["name"] == name and {*table["sources"]} == numbers
    for source in table["sources"].values():
        assert source.split(":")[0] in MARKS
    if any(source.startswith("fitted: on") for source in table["sources"].values()):
        assert fitted_on(name)


def test_serving_has_stacks_of_its_own():
    assert with_usual_stack("dgx-h100:2", serving=True) == "dgx-h100:2+tensorrt-llm-h100"
    assert with_usual_stack("dgx-h100+plain", serving=True) == "dgx-h100+plain"
    for name in ("h200-node", "b200-node"):           # by the constants of the H100, compared with nothing
        told = Hardware.preset(with_usual_stack(name, serving=True))
        assert told.stack == f"tensorrt-llm-{name[:4]}" and not told.validation
        assert told.step_seconds == Hardware.preset("dgx-h100+tensorrt-llm-h100").step_seconds > 0
        assert told.sources["step_seconds"].startswith(f"{told.stack}, estimate: as tensorrt-llm-h100")
    assert with_usual_stack("tpu-v4", serving=True) == "tpu-v4"


def test_a_stack_replaces_constants_of_a_preset_and_nothing_else():
    plain, told = Hardware.preset("dgx-a100:4"), Hardware.preset("dgx-a100:4+megatron-a100")
    assert told == on_stack(plain, "megatron-a100") and told.devices == plain.devices
    assert (told.stack, told.fused, plain.stack, plain.fused) == ("megatron-a100", "elementwise", "", False)
    assert told.overlapping and 0 < told.collective_share < 1 and not plain.overlapping
    assert (Software.of(told), Software.of(plain), Software.of(None)) == (
        ("elementwise", True, True), (False, False, False), Software())
    assert (told.flops_per_second, told.links[1], told.memory_bytes) == (
        plain.flops_per_second, plain.links[1], plain.memory_bytes)
    assert told.links[0].bytes_per_second == plain.links[0].bytes_per_second
    assert told.sources["links.nvlink.reached.base_seconds"].startswith("megatron-a100, fitted: on nccl-a100")
    assert told.sources["flops_efficiency"].startswith("megatron-a100, fitted: on korthikanti-2022")
    assert "megatron-a100" in str(told)
    assert sized_hardware("dgx-a100+megatron-a100", 20).devices == 24
    assert sized_hardware("dgx-a100:2+megatron-a100", 16).devices == 16


def test_a_stack_says_what_its_seconds_were_compared_with_on_its_own_hardware():
    told = Hardware.preset("dgx-a100:2+megatron-a100").validation
    assert [(each.table, each.held_out) for each in told] == [
        ("korthikanti-2022", False), ("zero-bubble-2023", True), ("nccl-a100", True)]
    assert validation_text(told[:2]) == (
        "18 layers and steps of korthikanti-2022, fitted: 2.9% in the mean; "
        "8 layers of zero-bubble-2023, held out: 6.5% in the mean")
    for name in ("h200-node+megatron-a100", "dgx-h100+megatron-h100", "dgx-a100"):
        assert Hardware.preset(name).validation == ()
    assert compared_in("bfloat16", told) == told and compared_in("float8", told) == ()
    float8 = Validation("a", "steps", 9, 0.01, False, "float8")
    assert compared_in("float8", (*told, float8)) == (float8,) and compared_in("float16", (*told, float8)) == told
    routed = replace(float8, experts=True)
    assert compared_in("float8", (*told, float8, routed), experts=True) == (routed,)
    assert compared_in("float8", (float8, routed)) == (float8,)
    assert str(float8) == "9 steps in float8 of a, fitted: 1.0% in the mean"
    assert validation_json(()) == {"compared": [], "text": "nothing: errors of 10 to 30 % are usual"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", stack_names())
def test_no_table_that_a_stack_was_fitted_to_is_told_as_held_out_whole(name):
    """Only rows that the fit left out may be: those of groups of 4 devices in nccl-a100, every second run of training."""
    for each in read_stack(name).get("validation", []):
        if each["table"] in fitted_on(name) and each["held_out"] and each["table"] != "nccl-a100":
            published = Table.of(each["table"])
            tested = [row.published for row in published.rows if row not in published.fitted_rows]
            float8 = [run for run in tested if run.columns["precision"] != "bf16"]
            assert each.get("experts", False) == (each["table"] == "experts-h100")
            assert each["rows"] == (len(float8) if each.get("products") else len(tested) - len(float8)) > 0


def test_what_is_wrong_with_a_validation_is_told(tmp_path):
    text = ('name = "mine"\ntitle = "mine"\nfitted_on = []\n[[validation]]\ntable = "t"\nwhat = "steps"\nrows = 0\n'
            'mean_error = 0.1\nheld_out = true\n[sources]\n')
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(HardwareFileError, match=r"validation\[0\]\.rows must be a whole number of at least 1; got 0"):
        Hardware.of(f"dgx-h100+{tmp_path / 'mine.toml'}")
    (tmp_path / "mine.toml").write_text(text.replace("rows = 0", "rows = 3"))
    (compared,) = Hardware.of(f"dgx-h100+{tmp_path / 'mine.toml'}").validation
    assert compared == Validation("t", "steps", 3, 0.1, True)


def test_a_typing_error_is_told_the_nearest_stack():
    with pytest.raises(ValueError, match="no stack 'megatron-a10'; did you mean 'megatron-a100'"):
        Hardware.preset("dgx-a100+megatron-a10")
    with pytest.raises(ValueError, match="no hardware 'dgx-a10'"):
        Hardware.preset("dgx-a10+megatron-a100")


def test_how_far_off_seconds_are_is_said_by_rows_that_nothing_was_fitted_to():
    fitted, held = Validation("a", "steps", 9, 0.01, False), Validation("b", "steps", 3, 0.04, True)
    assert usual_error(()) == 0.1 and usual_error((fitted,)) == pytest.approx(0.01)
    assert usual_error((fitted, held, replace(held, rows=1, mean_error=0.08))) == pytest.approx(0.05)


def test_an_mfu_above_all_published_ones_is_told():
    assert mfu_remark("dgx-h100", "bfloat16", 0.6) == mfu_remark("dgx-h100", "float8", 0.9) == ""
    assert mfu_remark("dgx-h100", "bfloat16", 0.7).startswith("An MFU of 70.0% is above 64.6%, the highest of the published")


def test_a_transformer_gets_the_stack_of_its_training():
    assert with_usual_stack("dgx-h100") == "dgx-h100+megatron-core-h100" and with_usual_stack("tpu-v4") == "tpu-v4"
    assert with_usual_stack("dgx-h100:4") == "dgx-h100:4+megatron-core-h100"
    assert with_usual_stack("dgx-h100+pytorch-h100") == "dgx-h100+pytorch-h100"
    assert Hardware.preset("dgx-h100:2+plain") == Hardware.preset("dgx-h100:2")


def test_a_model_with_experts_gets_a_stack_that_was_compared_with_such_models():
    dense, mixture = (models.transformer(name) for name in ("llama3-8b", "mixtral-8x7b"))
    for name in ("dgx-h100:2", "dgx-a100", "tpu-v4", "dgx-h100+plain"):
        stacked = searched_hardware(name, mixture)
        compared = Hardware.preset(stacked).validation
        assert stacked == (searched_hardware(name, dense) if any(each.experts for each in compared) else name)
    assert searched_hardware("dgx-h100", mixture) == "dgx-h100+megatron-core-h100"
    assert searched_hardware("dgx-a100", mixture) == "dgx-a100" != searched_hardware("dgx-a100", dense)
    assert searched_hardware("dgx-h100", "a program") == "dgx-h100"


@pytest.mark.parametrize(("devices", "used", "racks"), [(72, 72, 1), (128, 64, 2), (256, 64, 4), (144, 72, 2), (100, 72, 2)])
def test_racks_are_used_evenly_where_whole_hosts_are(devices, used, racks):
    found = sized_hardware("gb200-nvl72+megatron-core-b200", devices)
    assert [link.extents for link in found.links] == [(used,), (racks,)] and found.stack == "megatron-core-b200"
    assert found.level(0, used - 1) == 0 and (racks == 1 or found.level(used - 1, used) == 1)
