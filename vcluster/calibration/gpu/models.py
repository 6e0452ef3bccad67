"""The figures of layers and of small models, by value: what is built in PyTorch and what is simulated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """The figures of a layer; ``style`` is ``gpt`` (layer norms, gelu, biases) or ``llama`` (RMS norms, a gate)."""

    style: str
    width: int
    heads: int
    key_value_heads: int
    feed_forward: int

    @property
    def head_width(self) -> int:
        """The width of a head."""
        return self.width // self.heads

    @property
    def is_gpt(self) -> bool:
        """Whether it has biases, layer norms and gelu."""
        return self.style == "gpt"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight of a layer by name."""
        both = self.width + 2 * self.key_value_heads * self.head_width
        up = self.feed_forward if self.is_gpt else 2 * self.feed_forward
        products = {
            "qkv": (both, self.width),
            "out": (self.width, self.width),
            "up": (up, self.width),
            "down": (self.width, self.feed_forward),
        }
        found: dict[str, tuple[int, ...]] = {"norm1": (self.width,), "norm2": (self.width,), **products}
        if self.is_gpt:
            found |= {f"{name}.bias": (shape[0],) for name, shape in products.items()}
            found |= {"norm1.bias": (self.width,), "norm2.bias": (self.width,)}
        return found


@dataclass(frozen=True)
class Model:
    """A small model: layers of one kind, a table of tokens, and for ``gpt`` one of positions, and a tied head."""

    name: str
    sizes: Sizes
    layers: int
    vocabulary: int
    tokens: int
    microbatch: int
    microbatches: int = 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight by name."""
        width = self.sizes.width
        found: dict[str, tuple[int, ...]] = {"tokens": (self.vocabulary, width), "norm": (width,)}
        if self.sizes.is_gpt:
            found |= {"positions": (self.tokens, width), "norm.bias": (width,)}
        else:
            found["head"] = (self.vocabulary, width)
        for number in range(self.layers):
            found |= {f"{number}.{name}": shape for name, shape in self.sizes.shapes().items()}
        return found


MODELS = (
    Model("GPT, 12 of 768", Sizes("gpt", 768, 12, 12, 3072), 12, 50304, 1024, 8),
    Model("Llama, 8 of 2048", Sizes("llama", 2048, 16, 16, 5632), 8, 32000, 2048, 2, 2),
    Model("Llama, 4 of 4096", Sizes("llama", 4096, 32, 8, 14336), 4, 32000, 4096, 1),
    Model("GPT, 24 of 1024", Sizes("gpt", 1024, 16, 16, 4096), 24, 50304, 1024, 16),
    Model("GPT, 48 of 512", Sizes("gpt", 512, 8, 8, 2048), 48, 50304, 512, 32),
    Model("Llama, 2 of 8192", Sizes("llama", 8192, 64, 8, 28672), 2, 32000, 4096, 1),
    Model("Llama, 6 of 2048, 32k tokens", Sizes("llama", 2048, 16, 4, 5632), 6, 32000, 32768, 1),
    Model("Llama, 16 of 1024, 4 microbatches", Sizes("llama", 1024, 16, 4, 2816), 16, 32000, 2048, 8, 4),
)
QUICK_MODELS = (
    Model("GPT, 2 of 64", Sizes("gpt", 64, 4, 4, 256), 2, 512, 64, 2),
    Model("Llama, 2 of 64", Sizes("llama", 64, 4, 2, 192), 2, 512, 32, 1, 2),
    Model("Llama, 1 of 128", Sizes("llama", 128, 4, 4, 256), 1, 256, 48, 2),
)
