"""`ExpertSplit`: which devices hold different experts, as Megatron-LM's flags about expert parallelism say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from parallelism.models import TransformerSpec
from parallelism.training.flag_values import FlagValues
from parallelism.training.sequence_split import HEADS_AXIS
from parallelism.transforms import ExpertParallel


class ExpertSplit(NamedTuple):
    """The axes over which experts are split: one of their own, and some that split tokens already."""

    own: int = 1
    """The devices along ``ep``, which are replicas of attention."""
    beside: tuple[str, ...] = ()
    """Axes of context and tensor parallelism."""

    @classmethod
    def of(
        cls, flags: FlagValues, spec: TransformerSpec, contexts: Mapping[str, int], replicas: int
    ) -> ExpertSplit:
        """What the flags say of a model, whose sequences are split over the axes ``contexts``, on so many replicas.

        Megatron-LM counts the devices of experts from the innermost axis on (``order`` of
        ``initialize_model_parallel`` in megatron/core/parallel_state.py): those along tp, if an expert is whole on its
        device, then those along cp, then replicas.  Here all are replicas where the number of devices along cp does not
        divide what is left, and where tensor parallelism splits both experts and tokens.

        ``ValueError`` for numbers that do not fit the model or the devices.
        """
        size, tp = flags.expert_model_parallel_size or 1, flags.tensor_model_parallel_size or 1
        whole = flags.expert_tensor_parallel_size not in (None, tp)
        if whole and flags.expert_tensor_parallel_size != 1:
            raise ValueError(
                "--expert-tensor-parallel-size must be 1 or the --tensor-model-parallel-size, "
                f"{tp}, got {flags.expert_tensor_parallel_size}"
            )
        if whole and spec.experts is not None and size % tp:
            raise ValueError(
                "with --expert-tensor-parallel-size 1 the --expert-model-parallel-size must be a multiple of the "
                f"--tensor-model-parallel-size, {tp}, got {size}"
            )
        if whole and spec.experts is not None and not flags.sequence_parallel:
            raise ValueError("--expert-tensor-parallel-size 1 needs --sequence-parallel")
        count = 1 if spec.experts is None else spec.experts.count
        over_tp = tp if whole and spec.experts is not None else 1
        left = size // over_tp
        beside = ("tp",) if over_tp > 1 else ()
        along_cp = prod(contexts.values())
        if along_cp > 1 and left % along_cp == 0 and (whole or tp == 1):
            left //= along_cp
            beside = (*(axis for axis, n in contexts.items() if n > 1), *beside)
        if count % size or replicas % left:
            raise ValueError(
                f"--expert-model-parallel-size must divide the {count} experts and the {replicas * size // left} devices "
                f"that tensor, context and pipeline parallelism leave, got {size}"
            )
        return cls(left, beside)

    def axes(self) -> dict[str, int]:
        """The axis of their own; with one device where experts are split over others alone."""
        return {"ep": self.own} if self.own > 1 or self.beside else {}

    def transforms(self) -> Iterator[ExpertParallel]:
        """The transforms on a mesh with these axes."""
        if self.axes():
            yield ExpertParallel("ep", self.beside)

    @classmethod
    def flags(cls, transforms: Sequence[Any], sizes: Mapping[str, int]) -> dict[str, Any] | None:
        """The flags of a strategy with these transforms on a mesh; None if no flags say it."""
        experts = next((each for each in transforms if isinstance(each, ExpertParallel)), None)
        contexts = [axis for axis in ("cp", HEADS_AXIS) if sizes.get(axis, 1) > 1]
        if experts is None:
            return {}
        own = sizes.get(experts.axis, 1)
        over_cp = [axis for axis in experts.beside if axis != "tp"]
        along_cp = prod(sizes[axis] for axis in contexts)
        takes_cp = own % along_cp == 0 and ("tp" in experts.beside or sizes.get("tp", 1) == 1)
        if over_cp != contexts and (over_cp or takes_cp):
            return None
        size = own * prod(sizes[axis] for axis in experts.beside)
        return {
            "expert_model_parallel_size": size,
            "expert_tensor_parallel_size": 1 if "tp" in experts.beside else None,
        }
