"""A GPU measured through PyTorch, on tensors of the processor; skipped where there is no PyTorch, which is optional."""

from __future__ import annotations

import tomllib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from later import later
from paths import ROOT

torch = later("torch")

from parallelism import ir  # noqa: E402
from parallelism.models import TransformerSpec  # noqa: E402
from vcluster.__main__ import main  # noqa: E402
from vcluster.calibration.gpu.items import HOST_OPS, LAUNCHES, Item, items  # noqa: E402
from vcluster.calibration.gpu.measuring import NOT_MEASURED, Tables  # noqa: E402
from vcluster.calibration.gpu.models import QUICK_MODELS, Model, Sizes  # noqa: E402
from vcluster.calibration.gpu.through_torch.device import Device  # noqa: E402
from vcluster.calibration.gpu.through_torch.kernels import elementwise_row, product_row  # noqa: E402
from vcluster.calibration.gpu.through_torch.layers import (  # noqa: E402
    layer,
    loss,
    made_weights,
    norm,
    rotary_tables,
)
from vcluster.calibration.gpu.through_torch.steps import measured_step  # noqa: E402
from vcluster.calibration.gpu.through_torch.timing import Clock  # noqa: E402
from vcluster.calibration.gpu.through_torch.torch_found import NoTorchError, torch_on  # noqa: E402
from vcluster.cli.command_line import WrongWords  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread():
    """Threads of several workers on few cores wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def clock():
    return Clock(torch, "cpu", 0.0)


# -- from end to end ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_quick_calibration_writes_a_stack_that_plan_takes(tmp_path, capsys):
    path = tmp_path / "here.toml"
    assert main(["calibrate", "--gpu", "--gpu-device", "cpu", "--quick", "--output", str(path)]) == 0
    told = capsys.readouterr().out
    assert told.count("held out") == 4 and "constant MFU" in told and f"--hardware laptop+{path}" in told
    tables = Tables.load(path.with_suffix(".json"))
    assert {row[NOT_MEASURED] for _, row in tables.missing()} == {"ValueError: graphs are captured on a GPU only"}
    assert len(tables.missing()) == 1 and all("seconds" in note for note in tables.notes["training"])
    table = tomllib.loads(path.read_text())
    assert all(source.startswith(("measured: on ", "estimate: ")) for source in table["sources"].values())
    assert {"kernel_launch_seconds", "issue_seconds", "memory_bytes_per_second", "flops_per_second"} < {*table}
    words = ("plan gpt --num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128 --bf16 "
             "--global-batch-size 2 --devices 2 --fix tp=1 --fix pp=1 --fix zero=0 --simulations 0 --json")
    assert main([*words.split(), "--hardware", f"laptop+{path}"]) == 0
    assert '"stack": "here"' in capsys.readouterr().out


@pytest.mark.slow
def test_every_launch_of_a_whole_calibration_is_measured_but_graphs():
    device = Device(torch, "cpu", quick=True)
    for item in items():
        if item.table == LAUNCHES and "graph" not in (item.given["what"], item.given.get("how")):
            few = Item(item.table, {**item.given, **({"count": 3} if "count" in item.given else {})})
            assert all(value > 0 for value in device.measure(few).values()), str(item)
    assert {item.given["op"] for item in items(quick=True) if "op" in item.given} >= {*HOST_OPS}


@pytest.mark.parametrize(("device", "words"), [
    ("cuda", "PyTorch finds no GPU here: run this where there is one, or give --gpu-device cpu"),
    ("tpu", "a GPU to measure must be cuda, cuda:N or cpu; got 'tpu'"),
])
def test_a_device_that_is_not_there_is_told_in_a_line(device, words, tmp_path):
    if device == "cuda" and torch.cuda.is_available():
        assert torch_on("cuda") is torch
        return
    with pytest.raises(WrongWords, match=words):
        main(["calibrate", "--gpu", "--gpu-device", device, "--output", str(tmp_path / "a.toml")])
    with pytest.raises(NoTorchError, match="PyTorch has no device 'cpu:7'"):
        torch_on("cpu:7")


# -- the layers are those of the simulator -----------------------------------------------------------------------------


def grouped(qkv: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Columns of queries, keys and values as `TransformerSpec` has them: by groups of heads.

    Rotary positions turn features 2i and 2i+1 there, and i and i plus half of a head here.
    """
    rows, head, shared = qkv.shape[0], sizes.head_width, sizes.key_value_heads
    query, key, value = np.split(qkv, [sizes.width, sizes.width + shared * head], axis=-1)
    parts = [part.reshape(rows, shared, -1, head) for part in (query, key, value)]
    if not sizes.is_gpt:
        pairs = np.arange(head).reshape(2, -1).T.reshape(-1)
        parts[:2] = [part[..., pairs] for part in parts[:2]]
    return np.concatenate(parts, axis=2).reshape(rows, -1)


def weights_of(model: Model, weights: dict[str, Any]) -> dict[str, np.ndarray]:
    """The weights of PyTorch's model by the names, and in the layouts, of the simulator's."""
    found = {}
    for name, weight in weights.items():
        array, own = weight.detach().numpy(), f"p.{name.replace('.bias', '_bias')}"
        if name in ("tokens", "positions", "head"):
            found[own] = array
            continue
        rows = array.T if array.ndim == 2 else array[None]
        if ".qkv" in name:
            rows = grouped(rows, model.sizes)
        if ".up" in name and not model.sizes.is_gpt:
            found[own.replace("up", "gate")], rows = np.split(rows, 2, axis=-1)
        found[own] = rows if array.ndim == 2 else rows[0]
    return found


@pytest.mark.parametrize("sizes", [Sizes("gpt", 24, 3, 3, 40), Sizes("llama", 24, 4, 2, 40)])
def test_the_loss_is_that_of_the_simulated_model(sizes):
    model = Model("", sizes, 2, 32, 10, 3)
    torch.manual_seed(1)
    weights = {name: torch.randn(shape) * 0.3 for name, shape in model.shapes().items()}
    tokens = torch.randint(model.vocabulary, (3, 10))
    targets = torch.randint(model.vocabulary, (3, 10))
    tables = None if sizes.is_gpt else rotary_tables(torch, 10, sizes.head_width, "cpu", torch.float32)
    found = loss(torch, model, weights, tokens, targets, tables).item()
    gpt = sizes.is_gpt
    spec = TransformerSpec(
        layers=2, width=24, heads=sizes.heads, key_value_heads=sizes.key_value_heads, feed_forward=40, vocabulary=32,
        sequence=10, activation="gelu" if gpt else "swiglu", norm="layer" if gpt else "rms",
        positions="learned" if gpt else "rotary", biases=gpt, tied=gpt)
    function = spec.function(batch=3)
    ours = {**weights_of(model, weights), "tokens": tokens.numpy(), "targets": targets.numpy()}
    assert {value.name for value in function.inputs} == {*ours}
    (expected,) = ir.interpret(function, [ours[value.name] for value in function.inputs]).outputs
    assert found == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.slow
def test_training_lowers_the_loss(clock):
    row = measured_step(clock, QUICK_MODELS[1], 12)
    assert row["seconds"] > 0 and row["last_loss"] < row["first_loss"]


@pytest.mark.slow
def test_the_ops_of_a_step_are_recorded_with_their_shapes(clock):
    rows = {(row["name"], row["shapes"]): row for row in measured_step(clock, QUICK_MODELS[1], 2)["kernels"]}
    # Two microbatches through two layers: a product of 32 tokens for each.
    assert rows["aten::mm", "[[32, 64], [64, 384]]"]["count"] == 4
    assert all(row["what"] == "op" and row["seconds"] > 0 for row in rows.values())


def test_norms_by_one_kernel_and_by_hand_agree():
    x, weights = torch.randn(6, 24), {"norm1": torch.randn(24), "norm1.bias": torch.randn(24)}
    by_hand = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weights["norm1"]
    assert torch.allclose(norm(torch, Sizes("llama", 24, 4, 2, 40), x, weights, "norm1"), by_hand, atol=1e-6)


def test_a_layer_is_causal():
    sizes = Sizes("llama", 16, 4, 2, 24)
    weights = {name: weight.detach() for name, weight in made_weights(
        torch, sizes.shapes(), "cpu", torch.float32).items()}
    tables = rotary_tables(torch, 5, 4, "cpu", torch.float32)
    x = torch.randn(1, 5, 16)
    other = x.clone()
    other[:, 4] += 1.0
    one, two = (layer(torch, sizes, each, weights, tables) for each in (x, other))
    assert torch.equal(one[:, :4], two[:, :4]) and not torch.equal(one[:, 4], two[:, 4])


# -- the clock ---------------------------------------------------------------------------------------------------------


class _Events:
    """`torch.cuda` with a clock of its own; to record an event takes a microsecond."""

    def __init__(self) -> None:
        self.now, self.held = 0.0, 0
        self._sleep = self._wait
        self.Event = lambda enable_timing: _Event(self)

    def _wait(self, cycles: int) -> None:
        self.held += 1
        self.now += cycles / 2e9

    def synchronize(self, device: str) -> None:
        pass

    def get_device_properties(self, device: str) -> SimpleNamespace:
        return SimpleNamespace(L2_cache_size=1 << 10)


class _Event:
    def __init__(self, device: _Events) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.device.now += 1e-6
        self.at = self.device.now

    def elapsed_time(self, other: _Event) -> float:
        return (other.at - self.at) * 1e3


def test_seconds_on_a_gpu_are_those_between_its_events_without_what_holds_it():
    cuda = _Events()
    fills: list[int] = []
    other = SimpleNamespace(zero_=lambda: fills.append(1))
    clock = Clock(SimpleNamespace(cuda=cuda, uint8=None, empty=lambda *shape, **how: other), "cuda", 0.001)
    assert clock._cycles_per_second == pytest.approx(2e9, rel=1e-3) and clock.empty_seconds == pytest.approx(1e-6)
    fills.clear()

    def work() -> None:
        cuda.now += 3e-3

    held, timed = cuda.held, clock.time(work, least=5, most=7)
    assert timed.seconds == pytest.approx(3e-3) and 5 <= timed.repeats <= 7 and timed.apart == pytest.approx(0)
    assert cuda.held - held == timed.repeats == len(fills)
    assert clock.time(work, cold=False, least=5, most=5).repeats == 5 and len(fills) == timed.repeats


def test_tfloat32_is_left_as_it_was(clock):
    kept = torch.backends.cuda.matmul.allow_tf32
    given = {"m": 4, "n": 5, "k": 6, "dtype": "tfloat32", "layout": "tn"}
    assert product_row(clock, given)["flops_per_second"] > 0
    assert torch.backends.cuda.matmul.allow_tf32 == kept


@pytest.mark.slow
def test_what_has_no_gradient_is_timed_forward_alone(clock):
    row = elementwise_row(clock, {"op": "wide_cast", "rows": 3, "width": 5, "dtype": "bfloat16"})
    assert row["forward_seconds"] > 0 and not any(name.startswith("backward") for name in row)
    both = elementwise_row(clock, {"op": "gelu", "rows": 3, "width": 5, "dtype": "bfloat16"})
    assert both["backward_seconds"] > 0


def test_pytorch_is_imported_in_one_module_of_each_room_that_may():
    importing = []
    for package in ("vcluster", "parallelism", "tensor_parallelism", "pipeline_parallelism"):
        for file in (ROOT / package).rglob("*.py"):
            words = [line.split()[:2] for line in file.read_text(encoding="utf-8").splitlines()]
            if ["import", "torch"] in words or ["from", "torch"] in words:
                importing.append(file.name)
    assert sorted(importing) == ["pytorch.py", "torch_found.py"]     # modules are read there, and a GPU is measured
