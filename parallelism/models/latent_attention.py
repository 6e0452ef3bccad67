"""`LatentAttention`: keys and values of all heads made of one narrow vector for each token, by its figures."""

from __future__ import annotations

from dataclasses import dataclass

from parallelism.arrays import with_plain_numbers
from parallelism.display.quantities import short_errors


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention of DeepSeek-V2 (2024, arXiv:2405.04434, section 2.1); the figures are DeepSeek-V3's.

    A token is projected to ``key_value_rank`` features, of which, behind a norm, the keys and values of all heads are
    made; and to one rotated key of ``rotary_width`` features, which all heads share.  Queries are made of
    ``query_rank`` features in the same way.  ``ValueError`` for figures below 1 and an odd ``rotary_width``.
    """

    query_rank: int | None = 1536
    """None: queries are made of the token at once."""
    key_value_rank: int = 512
    head_width: int = 128
    """Features of a query and a key that are not rotated."""
    rotary_width: int = 64
    """Features of a query and a key that are rotated."""
    value_width: int = 128
    """Features of a value."""

    @short_errors
    def __post_init__(self) -> None:
        with_plain_numbers(self)
        for name in ("query_rank", "key_value_rank", "head_width", "rotary_width", "value_width"):
            value = getattr(self, name)
            if name == "query_rank" and value is None:
                continue
            if type(value) is not int or value < 1:
                raise ValueError(
                    f"{name} of latent attention must be an integer of at least 1, got {value!r}"
                )
        if self.rotary_width % 2:
            raise ValueError(f"rotary positions need an even rotary_width, got {self.rotary_width}")

    @property
    def query_width(self) -> int:
        """Features of a query and of a key: those that are rotated, and the others."""
        return self.head_width + self.rotary_width
