"""A loss over many devices: what is right in a drawn case, and which usual mistake explains what came."""

from vcluster.losses.cases import (
    AUXILIARY,
    AXES,
    GRADIENT,
    Array,
    Balanced,
    Batch,
    LossCase,
    Terms,
    Weight,
    drawn_cases,
)
from vcluster.losses.causes import cause_of
from vcluster.losses.facts import Facts, near
from vcluster.losses.programs import SplitLoss, with_gradients

__all__ = [
    "AUXILIARY",
    "AXES",
    "GRADIENT",
    "Array",
    "Balanced",
    "Batch",
    "Facts",
    "LossCase",
    "SplitLoss",
    "Terms",
    "Weight",
    "cause_of",
    "drawn_cases",
    "near",
    "with_gradients",
]
