"""Worked strategies inside an operator: one product, spread over the devices of a mesh axis."""

from __future__ import annotations

__all__: list[str] = []
