"""`StateSharding`: how far data parallelism shares out weights, gradients and state, as Megatron-LM's flags say it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from parallelism.mesh import Mesh
from parallelism.training.flag_values import FlagValues
from parallelism.transforms import DataParallel, Overlap, Transform, Zero
from parallelism.transforms.words import REPLICA

STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""The stage of ZeRO by the words of ``--data-parallel-sharding-strategy``."""
FULLY_SHARDED = STRATEGIES["optim_grads_params"]
"""The stage of ZeRO under which parameters are shared out, too, as FSDP does."""


class StateSharding(NamedTuple):
    """The stage of ZeRO inside of an instance of the optimizer, the number of instances, and the stage over these."""

    stage: int = 0
    instances: int = 1
    """So many groups of devices along dp hold all that is shared out, each once; their gradients are all-reduced."""
    outer_stage: int = 0

    @classmethod
    def of(cls, flags: FlagValues) -> StateSharding:
        """What the flags say.  ``ValueError`` for flags that need others, as in Megatron-LM."""
        instances = flags.num_distributed_optimizer_instances or 1
        if not flags.use_megatron_fsdp:
            if instances > 1 and not flags.use_distributed_optimizer:
                raise ValueError(
                    "--num-distributed-optimizer-instances needs --use-distributed-optimizer or --use-megatron-fsdp"
                )
            return cls(int(bool(flags.use_distributed_optimizer)), instances)
        stage = STRATEGIES[flags.data_parallel_sharding_strategy or "no_shard"]
        outer = STRATEGIES[flags.outer_dp_sharding_strategy or "no_shard"]
        if outer and (stage < STRATEGIES["optim_grads_params"] or instances == 1):
            raise ValueError(
                "--outer-dp-sharding-strategy optim needs --data-parallel-sharding-strategy optim_grads_params and "
                "--num-distributed-optimizer-instances above 1"
            )
        return cls(stage, instances, outer)

    def axes(self, replicas: int) -> dict[str, int]:
        """The axes of so many devices along dp, outermost first.

        ``ValueError`` if the instances do not divide the devices.  Instances of one device each share out nothing: then
        there is one axis.
        """
        if replicas % self.instances:
            raise ValueError(
                f"--num-distributed-optimizer-instances must divide the {replicas} devices along dp, got {self.instances}"
            )
        inner = replicas // self.instances
        return {"dp": replicas} if inner == 1 else {REPLICA: self.instances, "dp": inner}

    def transforms(self, mesh: Mesh, overlap: Overlap | None) -> Iterator[Transform]:
        """The transforms on a mesh with these axes; ``overlap`` is left out where no gradient is summed over dp or cp."""
        if REPLICA in mesh.axes:
            yield DataParallel(REPLICA)
        if "dp" in mesh.axes:
            yield DataParallel()
        shared = next((axis for axis in ("dp", "ep", "cp") if mesh.shape.get(axis, 1) > 1), None)
        if overlap is not None and shared in ("dp", "cp"):
            yield overlap
        alone = self.instances > 1 and REPLICA not in mesh.axes
        if self.stage and shared is not None and not alone:
            yield Zero(self.stage, shared)
        if self.outer_stage and REPLICA in mesh.axes:
            yield Zero(self.outer_stage, REPLICA)
