"""`strategy_run`: a training run whose strategy is told in words, in place of Megatron-LM's flags."""

from math import prod

from parallelism.mesh import Mesh
from parallelism.models import TransformerSpec
from parallelism.training.megatron import MegatronFlags
from parallelism.training.training_run import TrainingRun
from parallelism.transforms import DataParallel, Pipeline, Strategy, TensorParallel


def strategy_run(
    flags: MegatronFlags, strategy: Strategy, mesh: Mesh, named: TransformerSpec | None = None
) -> TrainingRun:
    """The run of a model with this strategy on a mesh; ``flags`` give the model, the batch and the optimizer.

    ``named`` is a model whose figures the flags change.  Without ``global_batch_size`` each replica has
    ``micro_batch_size`` sequences, or 1, in a microbatch.  ``ValueError`` for flags about the strategy, and for a batch
    that its replicas and microbatches do not divide.
    """
    if taken := [f"--{name.replace('_', '-')}" for name in flags.given("strategy")]:
        raise ValueError(f"--strategy says all about the strategy; leave out {', '.join(taken)}")
    pipelines = [each for each in strategy.transforms if isinstance(each, Pipeline)]
    replicas = {each.axis for each in strategy.transforms if isinstance(each, DataParallel)} | {"dp"}
    dealt = prod(mesh.shape.get(axis, 1) for axis in replicas)
    dealt *= pipelines[0].microbatches if pipelines else 1
    batch = flags.global_batch_size or (flags.micro_batch_size or 1) * dealt
    if flags.micro_batch_size is not None and batch != flags.micro_batch_size * dealt:
        raise ValueError(
            f"--global-batch-size must be --micro-batch-size {flags.micro_batch_size} times the {dealt} microbatches of "
            f"all replicas, {flags.micro_batch_size * dealt}; got {batch}"
        )
    split = {transform.axis for transform in strategy.transforms if isinstance(transform, TensorParallel)}
    devices = prod(mesh.shape.get(axis, 1) for axis in split)
    return TrainingRun(
        flags.spec(named).for_tensor_parallel(devices),
        batch,
        strategy,
        mesh,
        flags.trained_by,
        clip=flags.clip_grad or None,
        loss_scale=flags.loss_scale or None,
    )
