"""Single kernels through PyTorch: products, attention, elementwise ops, each with its gradient where it has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from vcluster.calibration.gpu.items import Given
from vcluster.calibration.gpu.through_torch.layers import backend_chosen, rotary_tables, rotated
from vcluster.calibration.gpu.through_torch.timing import Clock

Row = dict[str, Any]
Made = tuple[Callable[[], Any], Sequence[Any]]
"""A forward, and what it has gradients of."""
Make = Callable[[Clock, Given], Made]
FLOAT8_MOST = 448.0
"""The largest number of float8_e4m3fn."""


def dtype_of(torch: Any, name: str) -> Any:
    """The dtype of PyTorch with this name; ``tfloat32`` is how float32 is multiplied."""
    return getattr(torch, {"tfloat32": "float32", "float8": "float8_e4m3fn"}.get(name, name))


def drawn(clock: Clock, *shape: int, dtype: str = "bfloat16") -> Any:
    """Random normal numbers: zeros take less power, and so less time."""
    kind = dtype_of(clock.torch, dtype)
    if dtype == "float8":
        return clock.torch.randn(*shape, device=clock.device).clamp(-FLOAT8_MOST, FLOAT8_MOST).to(kind)
    return clock.torch.randn(*shape, device=clock.device, dtype=kind)


def product_row(clock: Clock, given: Given) -> Row:
    """A product of m x k with k x n matrices, laid out as a forward (tn) or the two gradients (nn, nt) have them."""
    torch = clock.torch
    m = given["m"]
    n = given["n"]
    k = given["k"]
    dtype = given["dtype"]
    if dtype == "float8":
        work = _float8_product(clock, given)
    else:
        layout = given["layout"]
        left = drawn(clock, k, m, dtype=dtype).t() if layout == "nt" else drawn(clock, m, k, dtype=dtype)
        right = drawn(clock, n, k, dtype=dtype).t() if layout == "tn" else drawn(clock, k, n, dtype=dtype)
        result = torch.empty(m, n, device=clock.device, dtype=dtype_of(torch, dtype))

        def work() -> object:
            return torch.mm(left, right, out=result)

    kept = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tfloat32"
    try:
        timed = clock.time(work)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = kept
    return {**timed.row(), "flops_per_second": 2 * m * n * k / timed.seconds}


def _float8_product(clock: Clock, given: Given) -> Callable[[], object]:
    torch = clock.torch
    m = given["m"]
    n = given["n"]
    k = given["k"]
    left = drawn(clock, m, k, dtype="float8")
    right = drawn(clock, n, k, dtype="float8").t()
    by_row = given.get("scaling") == "row"
    shapes = ((m, 1), (1, n)) if by_row else ((), ())
    scales = [torch.ones(shape, device=clock.device) for shape in shapes]

    def work() -> object:
        return torch._scaled_mm(
            left, right, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return work


def both_ways(
    clock: Clock, forward: Callable[[], Any], inputs: Sequence[Any], *, forward_only: bool = False
) -> Row:
    """The times of a function and of its gradient with respect to ``inputs``."""
    torch = clock.torch
    with torch.no_grad():
        row = clock.time(forward).row("forward_")
    if forward_only:
        return row
    result = forward()
    results = result if isinstance(result, tuple) else (result,)
    gradients = [torch.randn_like(each) for each in results]

    def backward() -> object:
        return torch.autograd.grad(results, inputs, gradients, retain_graph=True)

    return {**row, **clock.time(backward).row("backward_")}


def attention_work(clock: Clock, given: Given) -> Made:
    """Attention of ``batch`` sequences; queries, keys and values lie as a product leaves them."""
    torch = clock.torch
    batch, heads, tokens, width = (given[name] for name in ("batch", "heads", "tokens", "head_width"))
    shared = given.get("key_value_heads", heads)
    query, key, value = (
        drawn(clock, batch, tokens, count, width, dtype=given["dtype"]).transpose(1, 2).requires_grad_()
        for count in (heads, shared, shared)
    )

    def forward() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=given["causal"], enable_gqa=shared != heads
        )

    return forward, (query, key, value)


def attention_row(clock: Clock, given: Given) -> Row:
    """Attention of ``batch`` sequences by one library, forward and backward.

    ``flops`` are those of all scores, 4 batch heads tokens^2 width: causal kernels compute half of them.
    """
    forward, inputs = attention_work(clock, given)
    with backend_chosen(clock.torch, given["backend"]):
        row = both_ways(clock, forward, inputs)
    scores = given["batch"] * given["heads"] * given["tokens"] ** 2
    return {**row, "flops": 4.0 * scores * given["head_width"]}


def decode_row(clock: Clock, given: Given) -> Row:
    """One query for each sequence over the keys and values of ``tokens`` tokens."""
    torch = clock.torch
    batch = given["batch"]
    tokens = given["tokens"]
    width = given["head_width"]
    heads, shared = given["heads"], given["key_value_heads"]
    query = drawn(clock, batch, heads, 1, width, dtype=given["dtype"])
    key, value = (drawn(clock, batch, shared, tokens, width, dtype=given["dtype"]) for _ in range(2))

    def work() -> object:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    with backend_chosen(torch, given["backend"]), torch.no_grad():
        timed = clock.time(work)
    nbytes = 2 * key.numel() * key.element_size()
    return {**timed.row(), "nbytes": nbytes, "bytes_per_second": nbytes / timed.seconds}


# -- elementwise -------------------------------------------------------------------------------------------------------


def _of_one(function: Callable[[Any, Any], Any]) -> Make:
    """A maker of work on one array (rows, width), from a function of PyTorch's functions and the array."""

    def make(clock: Clock, given: Given) -> Made:
        x = drawn(clock, given["rows"], given["width"], dtype=given["dtype"]).requires_grad_()
        return lambda: function(clock.torch, x), (x,)

    return make


def _norm(name: str) -> Make:
    def make(clock: Clock, given: Given) -> Made:
        torch, width = clock.torch, given["width"]
        functions = torch.nn.functional
        x = drawn(clock, given["rows"], width, dtype=given["dtype"]).requires_grad_()
        weight, bias = (drawn(clock, width, dtype=given["dtype"]).requires_grad_() for _ in range(2))
        if name == "layer_norm":
            return lambda: functions.layer_norm(x, (width,), weight, bias), (x, weight, bias)
        if name == "rms_norm":
            return lambda: functions.rms_norm(x, (width,), weight, 1e-5), (x, weight)

        def by_hand() -> Any:
            wide = x.float()
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight

        return by_hand, (x, weight)

    return make


def _of_two(function: Callable[[Any, Any, Any], Any]) -> Make:
    def make(clock: Clock, given: Given) -> Made:
        one, other = (
            drawn(clock, given["rows"], given["width"], dtype=given["dtype"]).requires_grad_()
            for _ in range(2)
        )
        return lambda: function(clock.torch, one, other), (one, other)

    return make


def _rotary(clock: Clock, given: Given) -> Made:
    heads = max(1, given["width"] // 128)
    x = drawn(clock, 1, given["rows"], heads, given["width"] // heads, dtype=given["dtype"]).transpose(1, 2)
    x = x.requires_grad_()
    tables = rotary_tables(clock.torch, given["rows"], given["width"] // heads, clock.device, x.dtype)
    return lambda: rotated(clock.torch, x, tables), (x,)


def _transposed(clock: Clock, given: Given) -> Made:
    heads = max(1, given["width"] // 128)
    x = drawn(clock, 1, heads, given["rows"], given["width"] // heads, dtype=given["dtype"]).requires_grad_()
    return lambda: x.transpose(1, 2).reshape(1, given["rows"], given["width"]), (x,)


def _swiglu(clock: Clock, given: Given) -> Made:
    """A gate and what it lets pass, which one product made: they lie beside each other in a row."""
    both = drawn(clock, given["rows"], 2 * given["width"], dtype=given["dtype"]).requires_grad_()

    def forward() -> Any:
        gate, other = both.chunk(2, dim=-1)
        return clock.torch.nn.functional.silu(gate) * other

    return forward, (both,)


def _split(clock: Clock, given: Given) -> Made:
    """Three parts of a row, which are views; the gradient puts theirs together."""
    whole = drawn(clock, given["rows"], given["width"], dtype=given["dtype"]).requires_grad_()
    part = given["width"] // 4

    def forward() -> Any:
        return whole.split((given["width"] - 2 * part, part, part), dim=-1)

    return forward, (whole,)


def _embedding(clock: Clock, given: Given) -> Made:
    table = drawn(clock, given["vocabulary"], given["width"], dtype=given["dtype"]).requires_grad_()
    rows = clock.torch.randint(given["vocabulary"], (given["rows"],), device=clock.device)
    return lambda: clock.torch.nn.functional.embedding(rows, table), (table,)


def _classes(wide: bool) -> Make:
    def make(clock: Clock, given: Given) -> Made:
        functions = clock.torch.nn.functional
        logits = drawn(clock, given["rows"], given["width"], dtype=given["dtype"]).requires_grad_()
        targets = clock.torch.randint(given["width"], (given["rows"],), device=clock.device)
        if wide:
            return lambda: functions.cross_entropy(logits.float(), targets), (logits,)
        return lambda: functions.cross_entropy(logits, targets), (logits,)

    return make


def _plain(name: str) -> Make:
    """Work without a gradient: casts, copies, sums."""

    def make(clock: Clock, given: Given) -> Made:
        torch = clock.torch
        rows = given["rows"]
        width = given["width"]
        wide = drawn(clock, rows, width, dtype="float32")
        narrow = drawn(clock, rows, width)
        other, bias = torch.empty_like(narrow), drawn(clock, width)
        works: Mapping[str, Callable[[], Any]] = {
            "narrow_cast": lambda: wide.to(torch.bfloat16),
            "wide_cast": narrow.float,
            "copy": lambda: other.copy_(narrow),
            "accumulate": lambda: wide.add_(narrow),
            "bias_add": lambda: narrow + bias,
            "column_sum": lambda: narrow.sum(0),
        }
        return works[name], ()

    return make


_MAKERS: Mapping[str, Make] = {
    **{name: _norm(name) for name in ("layer_norm", "rms_norm", "rms_norm_by_hand")},
    "gelu": _of_one(lambda torch, x: torch.nn.functional.gelu(x)),
    "gelu_tanh": _of_one(lambda torch, x: torch.nn.functional.gelu(x, approximate="tanh")),
    "relu": _of_one(lambda torch, x: torch.nn.functional.relu(x)),
    "softmax": _of_one(lambda torch, x: torch.softmax(x, dim=-1)),
    "dropout": _of_one(lambda torch, x: torch.nn.functional.dropout(x, 0.1)),
    "silu_gate": _of_two(lambda torch, gate, x: torch.nn.functional.silu(gate) * x),
    "add": _of_two(lambda torch, one, other: one + other),
    "rotary": _rotary,
    "transpose": _transposed,
    "swiglu": _swiglu,
    "split": _split,
    "embedding": _embedding,
    "cross_entropy": _classes(False),
    "cross_entropy_float32": _classes(True),
    **{
        name: _plain(name)
        for name in ("narrow_cast", "wide_cast", "copy", "accumulate", "bias_add", "column_sum")
    },
}


def elementwise_row(clock: Clock, given: Given) -> Row:
    """An op whose work is proportional to its elements, forward and, where there is one, backward."""
    forward, inputs = elementwise_work(clock, given)
    return both_ways(clock, forward, inputs, forward_only=not inputs)


def elementwise_work(clock: Clock, given: Given) -> Made:
    """The work of an op whose work is proportional to its elements."""
    return _MAKERS[given["op"]](clock, given)


def compiled_op_row(clock: Clock, given: Given) -> Row:
    """Such an op by the compiler; ``first_seconds`` is how long it compiled the forward."""
    plain, inputs = elementwise_work(clock, given)
    forward = clock.torch.compile(plain)
    began = perf_counter()
    forward()
    first = perf_counter() - began
    return {**both_ways(clock, forward, inputs), "first_seconds": first}
