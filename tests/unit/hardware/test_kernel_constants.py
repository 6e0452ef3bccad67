"""Constants of single kernels: how many, how many times their bytes, what attention reaches; in a file, in a price."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from parallelism import Hardware, Mesh
from parallelism.cost import Costs
from parallelism.hardware import AttentionRate, HardwareFileError, HostLink, Kernel, Link
from parallelism.hardware.kernels import kernel_of
from parallelism.models import TransformerSpec
from parallelism.simulation import simulate
from parallelism.transforms import AdamW, train_step

RATES = (AttentionRate(64, True, 0.25, 96.0), AttentionRate(128, True, 0.5), AttentionRate(128, False, 0.4))
KERNELS = {
    "norm": Kernel(launches=3.0, times=2.5), "gelu": Kernel(times=1.5), "split": Kernel(0, 0), "scalars": Kernel(0, 0),
    "einsum": Kernel(others=1.5), "attention": Kernel(rates=RATES),
}
PLAIN = Hardware(
    name="ours", flops_per_second={"float32": 1e12, "bfloat16": 4e12}, memory_bytes=16e9, memory_bytes_per_second=1e12,
    links=(Link("wire", 2, 1e-6, 1e9),), host=HostLink(1e-5, 1e9), kernel_launch_seconds=2e-6, flops_efficiency=0.8)
OURS = replace(PLAIN, kernels=KERNELS)


def seconds(hardware: Hardware, kernel: str | None, flops: float = 0.0, nbytes: float = 0.0, **more) -> float:
    return Costs(hardware).compute_seconds(flops, nbytes, dtype="bfloat16", kernel=kernel, **more)


def test_a_kernel_takes_its_launches_and_so_many_times_its_bytes():
    assert seconds(OURS, "norm", nbytes=1e6) == pytest.approx(3 * 2e-6 + 2.5e-6, rel=1e-12)
    assert seconds(OURS, "split", nbytes=1e6) == 0
    assert seconds(OURS, "other", nbytes=1e6) == seconds(PLAIN, "other", nbytes=1e6) == pytest.approx(3e-6)
    assert seconds(OURS, None, nbytes=1e6) == pytest.approx(3e-6)
    assert seconds(replace(OURS, issue_seconds=4e-6), "norm", nbytes=1e6) == pytest.approx(12e-6)      # three are issued


def test_a_device_waits_for_the_host_behind_a_kernel_whatever_its_size():
    waiting = replace(PLAIN, kernels={"dispatch": Kernel(host_seconds=5e-4)})
    for nbytes in (1e3, 1e6):
        assert seconds(waiting, "dispatch", nbytes=nbytes) == pytest.approx(5e-4 + seconds(PLAIN, "dispatch", nbytes=nbytes))
    assert seconds(waiting, "other", nbytes=1e6) == seconds(PLAIN, "other", nbytes=1e6)
    assert seconds(waiting.slow(rank=1, factor=2.0), "dispatch", nbytes=1e6, rank=1) == pytest.approx(2 * 5.03e-4)
    assert "dispatch 1 times its bytes, then 500 us of the host" in str(waiting).replace("\n", " ")


def test_work_on_few_numbers_has_constants_of_its_own():
    assert seconds(OURS, "norm", nbytes=64) == 0 and seconds(OURS, "norm", nbytes=65) > 6e-6
    assert seconds(replace(PLAIN, kernels={"norm": Kernel(3)}), "norm", nbytes=64) > 6e-6


def test_a_chain_has_its_own_constants_or_those_of_its_longest_op():
    assert kernel_of(KERNELS, "add+gelu") is KERNELS["gelu"]
    assert kernel_of(KERNELS, "gelu+norm+...") is KERNELS["norm"]
    assert kernel_of(KERNELS, "split+add") is None and kernel_of(KERNELS, "add") is None
    assert kernel_of({**KERNELS, "add+gelu": Kernel(7)}, "add+gelu").launches == 7


def test_an_activation_with_weights_has_the_constants_of_the_one_without():
    kernels = {"swiglu": Kernel(3), "swiglu_gradient": Kernel(5)}
    for name, kernel in kernels.items():
        assert kernel_of(kernels, f"weighted_{name}") is kernel
    assert kernel_of({"gelu": Kernel(7)}, "weighted_swiglu") is None


def test_the_bytes_of_other_dtypes_of_a_product_are_moved_by_a_kernel_behind_it():
    given = {"flops": 4e6, "nbytes": 5e6}
    alone = seconds(OURS, "einsum", **given)
    assert alone == seconds(PLAIN, "einsum", **given)
    assert seconds(OURS, "einsum", **given, other_bytes=2e6) == pytest.approx(alone + 2e-6 + 3e-6)
    assert seconds(PLAIN, "einsum", **given, other_bytes=2e6) == alone


def test_attention_reaches_the_rate_of_its_width_and_mask_by_its_length():
    def attention(width: int, causal: int, keys: int = 96, kernel: str | None = "attention") -> float:
        return seconds(OURS, kernel, 4e9 if causal else 8e9, 10.0, shape=(6, 96, keys, width, causal)) - 2e-6

    assert attention(128, 1) == pytest.approx(1e-3 / 0.5)                 # 4e9 flops at half of 4e12 a second
    assert attention(128, 0) == pytest.approx(2e-3 / 0.4)
    assert attention(64, 1) == pytest.approx(1e-3 / 0.25 * 2)             # 96 keys are those of half of its efficiency
    assert attention(64, 1, keys=288) == pytest.approx(1e-3 / 0.25 * 4 / 3)
    assert attention(80, 1) == attention(64, 1) and attention(100, 1) == attention(128, 1) == attention(500, 1)
    assert attention(64, 0) == attention(128, 0)                          # no rate of this width without a mask
    assert attention(64, 1, kernel=None) == pytest.approx(1e-3 / 0.8)     # without constants at the efficiency of products


def test_without_constants_of_kernels_a_shape_of_attention_changes_nothing():
    shaped = seconds(PLAIN, "attention", 8e9, 10.0, shape=(6, 96, 96, 64, 1))
    assert shaped == seconds(PLAIN, None, 8e9, 10.0)
    squares = Hardware.preset("dgx-a100")
    assert squares.products is not None
    assert seconds(squares, "attention", 8e9, 10.0, shape=(6, 96, 96, 64, 1)) == seconds(squares, None, 8e9, 10.0)


SPEC = TransformerSpec(layers=2, width=48, heads=3, vocabulary=40, sequence=16)


def test_the_names_and_shapes_are_those_of_traces():
    step = train_step(SPEC.function(batch=5), AdamW())
    columns = simulate(step, PLAIN.placed([0]), mesh=Mesh(dp=1), op_by_op=True).columns
    shapes = {}
    for name, shape in zip(columns.values("name"), columns.values("shape"), strict=True):
        shapes.setdefault(name, set()).add(shape)
    assert shapes["attention"] == shapes["attention_gradient"] == {(15, 16, 16, 16, 1)}
    assert None not in shapes["matmul"] and shapes["layer_norm"] == {None}


@pytest.mark.takes_seconds
def test_a_step_on_such_a_hardware_takes_what_its_kernels_take():
    step = train_step(SPEC.function(batch=5), AdamW())
    free = replace(PLAIN, kernels={"attention": Kernel(0, 0, rates=(AttentionRate(16, True, 1e-3),))})
    plain, told = (
        simulate(step, hardware.placed([0]), mesh=Mesh(dp=1)).makespan_seconds for hardware in (PLAIN, free))
    # Each of two: 4 x 15 x 16 flops for each of 16 x 17 / 2 scores, at a thousandth of 1e12 a second.
    flops = 4 * 15 * 16 * 16 * 17 / 2
    computed = 2 * flops / (1e12 * 1e-3)
    columns = simulate(step, PLAIN.placed([0]), mesh=Mesh(dp=1), op_by_op=True).columns
    attention = columns.isin("name", {"attention"})
    assert attention.sum() == 2
    before = 2 * seconds(PLAIN, None, flops, float(columns.numbers("nbytes")[attention][0]))
    assert told - plain == pytest.approx(computed - before, rel=0.05)


def test_kernels_are_written_and_read_in_json_and_toml(tmp_path):
    OURS.save(tmp_path / "ours.json")
    assert Hardware.load(tmp_path / "ours.json") == OURS == pickle.loads(pickle.dumps(OURS))  # noqa: S301
    assert hash(OURS) == hash(Hardware.load(tmp_path / "ours.json"))
    (tmp_path / "stack.toml").write_text(STACK)
    told = Hardware.of(f"dgx-h100+{tmp_path / 'stack.toml'}")
    assert dict(told.kernels) == {
        "norm": Kernel(times=2.5), "add+gelu": Kernel(2), "attention": Kernel(rates=(AttentionRate(64, True, 0.5, 300),))}
    assert told.sources["kernels.norm"] == "mine, measured: here"
    text = " ".join(str(told).split())
    assert "50% of the peak with heads of 64, causal, half of that over 300 keys" in text
    assert "norm 2.5 times its bytes, add+gelu 1 times its bytes as 2 kernels" in text


STACK = """
name = "mine"
title = "mine"
fitted_on = []
[kernels.norm]
times = 2.5
[kernels."add+gelu"]
launches = 2
[kernels.attention]
rates = [{width = 64, causal = true, efficiency = 0.5, half_length = 300}]
[sources]
"kernels.norm" = "measured: here"
"""


@pytest.mark.parametrize(("was", "now", "words"), [
    ("times = 2.5", "times = -1", r"kernels\.norm\.times must be a number, at least 0; got -1"),
    ("times = 2.5", "time = 2.5", r"kernels\.norm\.time is no field; did you mean 'times'"),
    ("efficiency = 0.5", "efficiency = 1.5", r"kernels\.attention\.rates\[0\]\.efficiency must be a number, above 0 and"),
    ("causal = true", "causal = 1", r"rates\[0\]\.causal must be true or false; got 1"),
    ("width = 64, ", "", r"kernels\.attention\.rates\[0\]\.width is missing"),
    ("[kernels.norm]\ntimes = 2.5", "[kernels]\nnorm = 3", r"kernels\.norm must be a table with launches, times"),
])
def test_what_is_wrong_with_a_kernel_is_told(was, now, words, tmp_path):
    assert was in STACK
    (tmp_path / "stack.toml").write_text(STACK.replace(was, now))
    with pytest.raises(HardwareFileError, match=words):
        Hardware.of(f"dgx-h100+{tmp_path / 'stack.toml'}")


def test_kernels_that_are_none_are_refused():
    with pytest.raises(TypeError, match=r"kernels\.norm must be a Kernel; got 3"):
        replace(PLAIN, kernels={"norm": 3})
    with pytest.raises(TypeError, match="kernels must be a table of at most 200 kernels by the names of ops; got 3"):
        replace(PLAIN, kernels=3)
