"""`check_kernel` names the usual mistakes of kernels that pass blocks round a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vcluster import check_kernel

OTHER_WAY = "go round the ring along 'sp' in the other direction than the kernel counts"
TOO_FEW = "the ring along 'sp' has one step too few"
OFFSET = "a causal mask needs the offset of the shard, device.position('sp') times its rows"
RESCALE = "must be rescaled by exp(old - new)"


def softmax(scores: Any) -> Any:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def attention(q: Any, k: Any, v: Any) -> Any:
    return softmax(q @ k.T) @ v


def causal(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.T
    return softmax(np.where(np.tri(*scores.shape), scores, -np.inf)) @ v


def ring_attention(*, steps: int = 0, rescale: bool = True) -> Callable[..., Any]:
    """Attention over blocks of keys and values that go round; ``steps`` more than there are ranks."""
    def kernel(device: Any, q: Any, k: Any, v: Any) -> Any:
        largest = np.full((len(q), 1), -np.inf)
        total, out = np.zeros((len(q), 1)), np.zeros((len(q), v.shape[1]))
        for step in range(device.mesh.shape["sp"] + steps):
            if step:
                k, v = device.shift(k, "sp"), device.shift(v, "sp")
            scores = q @ k.T
            new = np.maximum(largest, scores.max(axis=1, keepdims=True, initial=-np.inf))
            powers = np.exp(scores - new)
            old = np.exp(largest - new) if rescale else 1.0
            total, out = total * old + powers.sum(axis=1, keepdims=True), out * old + powers @ v
            largest = new
        return out / total
    return kernel


def gathered_causal(*, offset: bool) -> Callable[..., Any]:
    def kernel(device: Any, q: Any, k: Any, v: Any) -> Any:
        k, v = device.all_gather(k, "sp"), device.all_gather(v, "sp")
        rows = np.arange(len(q)) + (device.position("sp") * len(q) if offset else 0)
        scores = np.where(rows[:, None] >= np.arange(len(k)), q @ k.T, -np.inf)
        return softmax(scores) @ v
    return kernel


def ring_product(*, sign: int = 1, steps: int = 0) -> Callable[..., Any]:
    """``x @ w``, where rows of ``w`` go round: after step s a rank has those of the rank s before it."""
    def kernel(device: Any, x: Any, w: Any) -> Any:
        n, rank = device.mesh.shape["sp"], device.position("sp")
        out = np.zeros((len(x), w.shape[1]))
        for step in range(n + steps):
            if step:
                w = device.shift(w, "sp")
            owner = (rank - sign * step) % n
            out += x[:, owner * len(w):(owner + 1) * len(w)] @ w
        return out
    return kernel


def ring_gather(*, sign: int = 1, steps: int = 0) -> Callable[..., Any]:
    def kernel(device: Any, x: Any) -> Any:
        n, rank = device.mesh.shape["sp"], device.position("sp")
        whole = np.zeros((n * len(x), x.shape[1]))
        for step in range(n + steps):
            if step:
                x = device.shift(x, "sp")
            owner = (rank - sign * step) % n
            whole[owner * len(x):(owner + 1) * len(x)] = x
        return whole
    return kernel


ATTENTION, PRODUCT, GATHER = "S_sp, D; T_sp, D; T_sp, E -> S_sp, E", "M, K; K_sp, N -> M, N", "M_sp, N -> M, N"
SELF = "S_sp, D; S_sp, D; S_sp, E -> S_sp, E"
EVEN = [{"S": 4, "T": 4, "D": 3, "E": 2, "M": 4, "K": 4, "N": 3}]
ON = [{"sp": 1}, {"sp": 2}, {"sp": 4}]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kernel", "reference", "layouts"), [
    (ring_attention(), attention, ATTENTION), (gathered_causal(offset=True), causal, SELF),
    (ring_product(), np.matmul, PRODUCT), (ring_gather(), np.copy, GATHER),
])
def test_right_rings_pass(kernel: Any, reference: Any, layouts: str) -> None:
    assert check_kernel(kernel, reference, layouts, meshes=ON, sizes=EVEN) == 3


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kernel", "reference", "layouts", "cause"), [
    (ring_product(sign=-1), np.matmul, PRODUCT, OTHER_WAY), (ring_gather(sign=-1), np.copy, GATHER, OTHER_WAY),
    (ring_product(steps=-1), np.matmul, PRODUCT, TOO_FEW), (ring_gather(steps=-1), np.copy, GATHER, TOO_FEW),
    (ring_attention(steps=-1), attention, ATTENTION, TOO_FEW),
    (gathered_causal(offset=False), causal, SELF, OFFSET),
    (ring_attention(rescale=False), attention, ATTENTION, RESCALE),
])
def test_the_mistake_of_a_ring_is_named(kernel: Any, reference: Any, layouts: str, cause: str) -> None:
    with pytest.raises(AssertionError) as failed:
        check_kernel(kernel, reference, layouts, meshes=ON if cause != TOO_FEW else ON[1:], sizes=EVEN)
    told = str(failed.value).partition("probably: ")[2]
    assert cause in told and told.count("\n") == 0


@pytest.mark.parametrize("kernel", [lambda device, x: x + device.rank, lambda device, x: np.sort(x, axis=0)[::-1]])
def test_another_mistake_is_not_called_one_of_a_ring(kernel: Any) -> None:
    with pytest.raises(AssertionError) as failed:
        check_kernel(kernel, np.copy, "M_sp, N -> M_sp, N", meshes=ON[1:], sizes=EVEN)
    assert "ring" not in str(failed.value)


def test_a_rank_that_holds_no_rows_is_named() -> None:
    with pytest.raises(Exception, match="zero-size array") as raised:
        check_kernel(lambda device, x: device.all_reduce(x.max(axis=0), "sp", op="max"), lambda x: x.max(axis=0),
                     "M_sp, N -> N", meshes=[{"sp": 3}], sizes=[{"M": 2, "N": 3}])
    assert raised.value.__notes__ == ["in check_kernel on Mesh(sp=3) with M=2, N=3, where rank 2 holds no rows of "
                                      "argument 1 (a shard of shape (0, 3))"]
    with pytest.raises(AssertionError, match="where ranks 1 and 2 hold no rows of argument 1"):
        check_kernel(lambda device, x: x + 1, np.copy, "M_sp -> M_sp", meshes=[{"sp": 3}], sizes=[{"M": 1}])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16", np.int8])
def test_a_dtype_may_be_a_narrow_float(dtype: Any) -> None:
    def gather(device: Any, x: Any) -> Any:
        return device.all_gather(x, "sp")

    seen = []
    check_kernel(gather, lambda x: seen.append(x.dtype) or x, "M_sp -> M", dtype=dtype)
    assert {each.name for each in seen} == {np.dtype(dtype).name if dtype is np.int8 else dtype}
    with pytest.raises(TypeError, match=r"dtype must be one of NumPy's, or .* such as 'bfloat16'; got 'bfloat61'"):
        check_kernel(gather, np.copy, "M_sp -> M", dtype="bfloat61")


@pytest.mark.parametrize(("options", "told"), [
    ({"sizes": {"M": 4}}, r"write sizes=\[\{'M': 4\}\]"), ({"sizes": [4]}, "got 4 in it"),
    ({"meshes": {"sp": 2}}, r"write meshes=\[\{'sp': 2\}\]"), ({"meshes": [2]}, "got 2 in it"),
    ({"meshes": "sp=2"}, r"write meshes=\['sp=2'\]"),
])
def test_one_case_in_place_of_a_list_is_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        check_kernel(lambda device, x: x, np.copy, "M_sp -> M_sp", **options)
