"""What is measured of a GPU: each item as a value, by table, the most needed first.

An item says what to do and how large it is.  `vcluster.calibration.gpu.through_torch.device` does it; a test may do it
in another way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Given = Mapping[str, Any]

PRODUCTS = "products"
ATTENTION = "attention"
ELEMENTWISE = "elementwise"
OPTIMIZER = "optimizer"
COPIES = "copies"
LAUNCHES = "launches"
SUSTAINED = "sustained"
DECODE = "decode"
LAYERS = "layers"
COMPILED = "compiled"
COMPILED_OPS = "compiled_ops"
COLLECTIVES = "collectives"
KERNELS = "kernels"
"""The table of the kernels of steps of training, which are no items: they are recorded with their step."""
NARROW = ("bfloat16", "float16", "float8")
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Item:
    """One thing to measure: the table it belongs to, and what it is given."""

    table: str
    given: Given = field(hash=False)

    def __str__(self) -> str:
        return f"{self.table}: " + " ".join(f"{name}={value}" for name, value in self.given.items())


def items(*, quick: bool = False, devices: int = 1) -> tuple[Item, ...]:
    """All items of a calibration, or of a quick one, which takes seconds on a processor.

    With several ``devices`` the collectives between them are first: all processes of a job do them together.
    """
    makers = (
        (_quick,)
        if quick
        else (
            _launches,
            _squares,
            _elementwise,
            _optimizers,
            _copies,
            _products_of_layers,
            _attention,
            _sustained,
            _skinny_products,
            _decode,
            _layers,
            _compiled_ops,
            _compiled,
        )
    )
    found = [*(_collectives(devices, quick) if devices > 1 else ())]
    return (*found, *(item for make in makers for item in make()))


def _of(table: str, **given: Any) -> Item:
    return Item(table, given)


def _product(m: int, n: int, k: int, dtype: str, layout: str = "tn", **more: Any) -> Item:
    return _of(PRODUCTS, m=m, n=n, k=k, dtype=dtype, layout=layout, **more)


def _squares() -> Iterator[Item]:
    """Each dtype on squares; of float8 with one scale for a matrix, and with one for each row."""
    for dtype in ("bfloat16", "float8", "float16", "tfloat32", "float32"):
        for size in (1024, 2048, 4096, 8192):
            if dtype != "float32" or size < 8192:
                yield _product(size, size, size, dtype)
    for size in (4096, 8192):
        yield _product(size, size, size, "float8", scaling="row")


def layer_products(
    width: int, feed_forward: int, key_value_width: int, gated: bool
) -> dict[str, tuple[int, int]]:
    """The products of a layer by name: columns of the result, and depth."""
    return {
        "qkv": (width + 2 * key_value_width, width),
        "out": (width, width),
        "up": (feed_forward * (1 + gated), width),
        "down": (width, feed_forward),
    }


def _products_of_layers() -> Iterator[Item]:
    """The products of layers of GPT and Llama: forward, for the gradient of the input and for that of the weight."""
    sizes = (
        (2048, 8192, 2048, False),
        (4096, 14336, 1024, True),
        (5120, 13824, 5120, True),
        (1024, 4096, 1024, False),
        (6144, 24576, 1024, True),
    )
    for width, hidden, narrow, gated in sizes:
        for name, (n, k) in layer_products(width, hidden, narrow, gated).items():
            for tokens in (2048, 8192):
                yield _product(tokens, n, k, "bfloat16", of=name)
                yield _product(tokens, n, k, "float8", of=name)
            yield _product(8192, k, n, "bfloat16", "nn", of=f"{name}, gradient of the input")
            yield _product(n, k, 8192, "bfloat16", "nt", of=f"{name}, gradient of the weight")
    for vocabulary, width in ((50304, 2048), (32000, 4096), (128256, 4096), (50304, 1024)):
        yield _product(4096, vocabulary, width, "bfloat16", of="head")
        yield _product(4096, width, vocabulary, "bfloat16", "nn", of="head, gradient of the input")
        yield _product(vocabulary, width, 4096, "bfloat16", "nt", of="head, gradient of the weight")


def _skinny_products() -> Iterator[Item]:
    """As decoding has them: few rows by a weight."""
    for n, k in ((4096, 4096), (14336, 4096)):
        for dtype in ("bfloat16", "float8"):
            for m in (1, 2, 4, 8, 16, 32, 64, 128, 256):
                yield _product(m, n, k, dtype, of="decode")


def _attention() -> Iterator[Item]:
    """16k tokens in all, or one sequence; 2048 features."""
    for tokens in (4096, 1024, 2048, 8192, 16384, 32768, 512):
        for head_width in (128, 64):
            for causal in (True, False):
                for backend in ("flash", "cudnn"):
                    yield _of(
                        ATTENTION,
                        backend=backend,
                        causal=causal,
                        head_width=head_width,
                        tokens=tokens,
                        batch=max(1, 16384 // tokens),
                        heads=2048 // head_width,
                        dtype="bfloat16",
                    )
    for backend, tokens, batch in (("efficient", 4096, 4), ("math", 2048, 2)):
        yield _of(
            ATTENTION,
            backend=backend,
            causal=True,
            head_width=128,
            tokens=tokens,
            batch=batch,
            heads=16,
            dtype="bfloat16",
        )
    yield _of(
        ATTENTION,
        backend="any",
        causal=True,
        head_width=128,
        tokens=4096,
        batch=4,
        heads=16,
        dtype="bfloat16",
    )
    for tokens in (4096, 2048, 16384):
        for backend in ("flash", "cudnn"):
            yield _of(
                ATTENTION,
                backend=backend,
                causal=True,
                head_width=128,
                tokens=tokens,
                batch=max(1, 8192 // tokens),
                heads=32,
                key_value_heads=8,
                dtype="bfloat16",
            )


ROWS_OPS = (
    "layer_norm",
    "rms_norm",
    "gelu",
    "gelu_tanh",
    "silu_gate",
    "relu",
    "softmax",
    "add",
    "dropout",
    "rotary",
    "transpose",
    "swiglu",
    "split",
)
CLASS_OPS = ("cross_entropy", "cross_entropy_float32")
PLAIN_OPS = ("narrow_cast", "wide_cast", "copy", "accumulate", "bias_add", "column_sum")


def _elementwise() -> Iterator[Item]:
    for op in ROWS_OPS:
        for rows, width in ((8192, 4096), (4096, 2048), (16384, 768)):
            yield _of(ELEMENTWISE, op=op, rows=rows, width=width, dtype="bfloat16")
    for op in PLAIN_OPS:
        for rows, width in ((8192, 4096), (4096, 2048), (512, 1024)):
            yield _of(ELEMENTWISE, op=op, rows=rows, width=width, dtype="bfloat16")
    for op in CLASS_OPS:
        for rows, width in ((4096, 32000), (8192, 50304), (4096, 128256)):
            yield _of(ELEMENTWISE, op=op, rows=rows, width=width, dtype="bfloat16")
    for rows, width, vocabulary in ((8192, 4096, 32000), (8192, 768, 50304)):
        yield _of(
            ELEMENTWISE, op="embedding", rows=rows, width=width, vocabulary=vocabulary, dtype="bfloat16"
        )
    for width in (1024, 4096, 8192):  # norms by the width of a row, in float32 too
        yield _of(ELEMENTWISE, op="layer_norm", rows=(1 << 24) // width, width=width, dtype="float32")
        yield _of(ELEMENTWISE, op="rms_norm_by_hand", rows=(1 << 24) // width, width=width, dtype="bfloat16")


def _optimizers() -> Iterator[Item]:
    """124 M and 500 M parameters, in tensors as a GPT has them."""
    for how in (
        "adamw_fused",
        "adamw_foreach",
        "adamw_main_weights",
        "accumulate_foreach",
        "copy_foreach",
        "clip",
        "zero_foreach",
    ):
        for layers, width in ((12, 768), (10, 2048)):
            yield _of(OPTIMIZER, how=how, layers=layers, width=width)
    yield _of(OPTIMIZER, how="adamw_plain", layers=12, width=768)


def _copies() -> Iterator[Item]:
    for power in range(16, 31, 2):
        yield _of(COPIES, way="device", nbytes=1 << power)
    for way in ("to_device_pinned", "to_host_pinned", "to_device_pageable", "to_host_pageable"):
        for power in (12, 16, 20, 24, 28):
            yield _of(COPIES, way=way, nbytes=1 << power)


HOST_OPS = ("add", "mul_inplace", "linear", "layer_norm", "gelu", "sdpa", "view")


def _launches() -> Iterator[Item]:
    yield _of(LAUNCHES, what="kernel", count=800)
    for op in HOST_OPS:
        yield _of(LAUNCHES, what="issue", op=op, count=400)
    for op in ("gelu", "linear", "layer_norm"):
        yield _of(LAUNCHES, what="issue_backward", op=op, count=200)
    yield _of(LAUNCHES, what="graph", count=800)
    for style in ("gpt", "llama"):
        for how in ("eager", "graph"):
            yield _of(LAUNCHES, what="small_layer", style=style, how=how)
    for how in ("adamw_fused", "adamw_foreach"):
        yield _of(LAUNCHES, what="optimizer_issue", how=how, tensors=148)
    yield _of(LAUNCHES, what="synchronize", count=100)


LONG_ATTENTION: dict[str, Any] = {
    "causal": True,
    "head_width": 128,
    "tokens": 8192,
    "batch": 2,
    "heads": 16,
    "dtype": "bfloat16",
}


def _sustained() -> Iterator[Item]:
    """Products and layers for seconds on end, as training has them: power and heat lower the clocks."""
    for dtype in ("bfloat16", "float8"):
        yield _of(SUSTAINED, what="product", size=8192, dtype=dtype, for_seconds=4.0)
    for kind in LAYER_KINDS[:4]:
        yield _of(SUSTAINED, what="layer", **kind, tokens=4096, batch=1, backend="any", for_seconds=3.0)
    yield _of(SUSTAINED, what="attention", **LONG_ATTENTION, backend="cudnn", for_seconds=2.0)
    yield _of(
        SUSTAINED, what="elementwise", op="gelu", rows=8192, width=8192, dtype="bfloat16", for_seconds=2.0
    )
    yield _of(SUSTAINED, what="product", size=2048, dtype="bfloat16", for_seconds=2.0)


def _decode() -> Iterator[Item]:
    """One query for each sequence over what is cached of it; 32 heads over 8 of keys, as Llama has them."""
    for tokens in (1024, 4096, 8192, 32768):
        for batch in (1, 4, 16, 64):
            if tokens * batch <= 1 << 20:
                for backend in ("flash", "cudnn", "any"):
                    yield _of(
                        DECODE,
                        backend=backend,
                        tokens=tokens,
                        batch=batch,
                        heads=32,
                        key_value_heads=8,
                        head_width=128,
                        dtype="bfloat16",
                    )


LAYER_KINDS: tuple[dict[str, Any], ...] = (
    {"style": "gpt", "width": 2048, "heads": 16, "key_value_heads": 16, "feed_forward": 8192},
    {"style": "llama", "width": 4096, "heads": 32, "key_value_heads": 8, "feed_forward": 14336},
    {"style": "gpt", "width": 4096, "heads": 32, "key_value_heads": 32, "feed_forward": 16384},
    {"style": "llama", "width": 2048, "heads": 32, "key_value_heads": 8, "feed_forward": 8192},
    {"style": "gpt", "width": 5120, "heads": 40, "key_value_heads": 40, "feed_forward": 20480},
    {"style": "llama", "width": 5120, "heads": 40, "key_value_heads": 40, "feed_forward": 13824},
)


def _layers() -> Iterator[Item]:
    """Whole layers of models, forward and backward, with attention by either library."""
    for tokens, batch in ((4096, 1), (2048, 4), (2048, 1), (8192, 1), (4096, 2), (2048, 2)):
        for kind in LAYER_KINDS:
            for backend in ("flash", "cudnn"):
                yield _of(LAYERS, **kind, tokens=tokens, batch=batch, backend=backend, recompute="none")
            if (tokens, batch) in ((4096, 1), (2048, 4)):
                yield _of(LAYERS, **kind, tokens=tokens, batch=batch, backend="flash", recompute="full")


def _compiled() -> Iterator[Item]:
    """What a compiler fuses: last, because it takes long to begin."""
    for kind in LAYER_KINDS[:2]:
        yield _of(COMPILED, **kind, tokens=4096, batch=1, backend="flash", recompute="none")


def _compiled_ops() -> Iterator[Item]:
    """Ops that a compiler makes one kernel of, forward and backward."""
    for op in ("rms_norm_by_hand", "layer_norm", "rotary", "swiglu", "gelu"):
        yield _of(COMPILED_OPS, op=op, rows=8192, width=4096, dtype="bfloat16")
    yield _of(COMPILED_OPS, op="cross_entropy_float32", rows=8192, width=50304, dtype="bfloat16")


def _collectives(devices: int, quick: bool) -> Iterable[Item]:
    sizes = (1 << 12, 1 << 16) if quick else tuple(1 << power for power in range(12, 31, 2))
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        for nbytes in sizes:
            yield _of(COLLECTIVES, name=name, nbytes=nbytes, devices=devices)


def _quick() -> Iterator[Item]:
    """A little of everything."""
    yield from _quick_launches()
    yield from _quick_products()
    yield from _quick_elementwise()
    yield from _quick_updates_and_copies()
    yield from _quick_attention()
    yield from _quick_sustained()
    yield from _quick_layers()


def _quick_launches() -> Iterator[Item]:
    yield _of(LAUNCHES, what="kernel", count=50)
    for op in HOST_OPS:
        yield _of(LAUNCHES, what="issue", op=op, count=20)
    yield _of(LAUNCHES, what="issue_backward", op="gelu", count=20)
    yield _of(LAUNCHES, what="graph", count=20)
    yield _of(LAUNCHES, what="small_layer", style="gpt", how="eager")
    yield _of(LAUNCHES, what="optimizer_issue", how="adamw_fused", tensors=8)
    yield _of(LAUNCHES, what="synchronize", count=20)


def _quick_products() -> Iterator[Item]:
    for dtype in ("bfloat16", "float32", "tfloat32", "float8"):
        for size in (64, 128, 256):
            yield _product(size, size, size, dtype)
    yield _product(128, 192, 96, "bfloat16", "nn", of="out, gradient of the input")
    yield _product(128, 192, 96, "bfloat16", "nt", of="out, gradient of the weight")
    yield _product(2, 256, 128, "bfloat16", of="decode")


def _quick_elementwise() -> Iterator[Item]:
    for op in (*ROWS_OPS, "rms_norm_by_hand", *PLAIN_OPS, *CLASS_OPS):
        yield _of(ELEMENTWISE, op=op, rows=128, width=256, dtype="bfloat16")
    yield _of(ELEMENTWISE, op="embedding", rows=64, width=64, vocabulary=128, dtype="bfloat16")


def _quick_updates_and_copies() -> Iterator[Item]:
    for how in (
        "adamw_fused",
        "adamw_foreach",
        "adamw_plain",
        "adamw_main_weights",
        "accumulate_foreach",
        "copy_foreach",
        "clip",
        "zero_foreach",
    ):
        yield _of(OPTIMIZER, how=how, layers=1, width=64)
    for way in ("device", "to_device_pinned", "to_host_pageable"):
        for nbytes in (4 * KIB, 256 * KIB, 4 * MIB):
            yield _of(COPIES, way=way, nbytes=nbytes)


def _quick_attention() -> Iterator[Item]:
    for causal in (True, False):
        yield _of(
            ATTENTION,
            backend="flash",
            causal=causal,
            head_width=16,
            tokens=64,
            batch=2,
            heads=2,
            key_value_heads=1 + causal,
            dtype="bfloat16",
        )


def _quick_sustained() -> Iterator[Item]:
    """Work that goes on until the clock of the GPU is the one that it keeps."""
    yield _of(SUSTAINED, what="product", size=128, dtype="bfloat16", for_seconds=0.1)
    yield _of(
        SUSTAINED,
        what="layer",
        style="gpt",
        width=64,
        heads=4,
        key_value_heads=4,
        feed_forward=128,
        tokens=32,
        batch=2,
        backend="any",
        for_seconds=0.1,
    )
    yield _of(
        SUSTAINED,
        what="attention",
        causal=True,
        head_width=16,
        tokens=32,
        batch=1,
        heads=2,
        dtype="bfloat16",
        backend="any",
        for_seconds=0.05,
    )
    yield _of(SUSTAINED, what="elementwise", op="gelu", rows=32, width=64, dtype="bfloat16", for_seconds=0.05)


def _quick_layers() -> Iterator[Item]:
    """Attention of decoding, and whole layers."""
    yield _of(
        DECODE, backend="any", tokens=64, batch=2, heads=4, key_value_heads=2, head_width=16, dtype="bfloat16"
    )
    for style, recompute in (("gpt", "none"), ("llama", "full")):
        yield _of(
            LAYERS,
            style=style,
            width=64,
            heads=4,
            key_value_heads=2 + 2 * (style == "gpt"),
            feed_forward=128,
            tokens=32,
            batch=2,
            backend="flash",
            recompute=recompute,
        )
