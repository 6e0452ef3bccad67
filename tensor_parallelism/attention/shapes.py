"""The shapes of the arrays of attention, and the check that they fit each other."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tensor_parallelism.products import Shape


@dataclass(frozen=True)
class AttentionShapes:
    """The shapes of the whole x, Wq, Wk, Wv and Wo.  ``ValueError`` if they do not fit each other."""

    x: Shape
    wq: Shape
    wk: Shape
    wv: Shape
    wo: Shape

    def __post_init__(self) -> None:
        dims = {"x": "(batch, sequence, model)", "wq": "(model, heads, head_dim)", "wk": "(model, kv_heads, head_dim)",
                "wv": "(model, kv_heads, head_dim)", "wo": "(heads, head_dim, model)"}
        for field in fields(self):
            if len(getattr(self, field.name)) != 3:
                raise ValueError(f"{field.name} is {dims[field.name]}, got shape {getattr(self, field.name)}")
        for name in ("wq", "wk", "wv"):
            if getattr(self, name)[0] != self.x[2]:
                raise ValueError(f"the last extent of x is the first of {name}, got x of shape {self.x} and {name} of "
                                 f"{getattr(self, name)}")
        if self.wv != self.wk:
            raise ValueError(f"wv is of the shape of wk, {self.wk}, got {self.wv}")
        if self.wk[2] != self.wq[2]:
            raise ValueError(f"wq and wk have one head_dim, got wq of shape {self.wq} and wk of {self.wk}")
        if self.wo[:2] != self.wq[1:]:
            raise ValueError(f"wo is (heads, head_dim, model) of the heads of wq, got wq of shape {self.wq} and wo of "
                             f"{self.wo}")
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"the query heads are a multiple of the key-value heads, got wq of shape {self.wq} with "
                             f"{self.heads} heads and wk of {self.wk} with {self.kv_heads}")

    @property
    def heads(self) -> int:
        return self.wq[1]

    @property
    def kv_heads(self) -> int:
        return self.wk[1]

    @property
    def head_dim(self) -> int:
        return self.wq[2]

    @property
    def out(self) -> Shape:
        return (*self.x[:2], self.wo[2])
