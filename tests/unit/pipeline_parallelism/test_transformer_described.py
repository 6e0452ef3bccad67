"""What a Transformer is, and what it refuses; nothing is started."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism import Mesh, Pipeline
from pipeline_parallelism import Transformer


def gpt(**options):
    given = {"vocabulary": 11, "width": 12, "heads": 3, "blocks": 2, "pipeline": Pipeline(1, 1), **options}
    return Transformer(**given)


@pytest.mark.parametrize("stages", range(1, 5))
def test_embedding_blocks_and_head_are_dealt_as_layers(stages):
    model = gpt(pipeline=Pipeline(stages, 2))
    dealt = [layer for stage in range(stages) for layer in model.layers_of(stage)]
    assert dealt == [0, 1, 2, 3]
    assert [list(model.parameter_shapes(layer)) for layer in (0, 3)] == [["table"], ["norm", "norm_bias", "table"]]
    assert model.parameter_shapes(1)["w1"] == (12, 48)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["megatron", "sequence"])
@pytest.mark.parametrize("mesh", [Mesh(pp=1), Mesh(tp=2), Mesh(dp=2, tp=3), Mesh(tp=4, pp=2)], ids=str)
def test_the_shards_of_every_mesh_are_those_of_the_same_parameters(mesh, policy):
    model = gpt(policy=policy, seed=3)
    whole, layers = model.initial_parameters(), range(model.layer_count)
    shards = [model.initial_shards(mesh, rank, layers) for rank, place in enumerate(mesh)
              if all(index == 0 for axis, index in place.items() if axis != "tp")]
    for joined, expected in zip(model.join_layers(mesh, layers, shards), whole, strict=True):
        for array, other in zip(joined, expected, strict=True):
            assert_array_equal(array, other)
    if "tp" in mesh.axes:
        assert all(len(part[0][0]) < 11 for part in shards)     # nobody has the whole table


def test_a_layer_is_drawn_from_the_seed_and_its_number():
    model, other = gpt(seed=3), gpt(seed=3, pipeline=Pipeline(2, 5), policy="sequence")
    for a, b in zip(model.initial_layers([2]), other.initial_layers([2]), strict=True):
        for x, y in zip(a, b, strict=True):
            assert_array_equal(x, y)
    assert not np.array_equal(model.initial_layers([1])[0][2], model.initial_layers([2])[0][2])
    assert not np.array_equal(model.initial_layers([1])[0][2], gpt(seed=4).initial_layers([1])[0][2])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"vocabulary": 0}, "vocabulary of a Transformer is an integer of at least 1, got 0"),
        ({"heads": 2.5}, "heads of a Transformer is an integer of at least 1, got 2.5"),
        ({"hidden": -1}, "hidden of a Transformer is an integer of at least 1, got -1"),
        ({"width": 10}, "the model is no multiple of the heads, got x of shape"),
        ({"head_dim": 5}, "rotary positions turn pairs of features, got wq of shape"),
        ({"policy": "ring"}, "policy is one of megatron, sequence, got 'ring'"),
        ({"activation": "gleu"}, "activation is one of relu, tanh, gelu, silu, identity, got 'gleu'"),
        ({"pipeline": Pipeline(5, 1)}, "5 stages need a layer each; blocks=2 makes 4 layers"),
        ({"pipeline": Pipeline(2, 1, "local")}, "a Transformer has one loss, at its end; schedule 'local' needs one"),
        ({"dtype": int}, "the dtype of a Transformer must be a floating one, got int64"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(options, reason):
    with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        gpt(**options)


@pytest.mark.parametrize(
    ("tokens", "targets", "error", "reason"),
    [
        ([[0.5]], [[1]], TypeError, "tokens must be integers, got float64"),
        ([1, 2], [1, 2], ValueError, r"tokens must have shape \(rows, sequence\), both at least 1, got \(2,\)"),
        (np.zeros((0, 3), int), np.zeros((0, 3), int), ValueError, r"both at least 1, got \(0, 3\)"),
        ([[1, 2]], [[1]], ValueError, r"targets must have the shape of the tokens, \(1, 2\), got \(1, 1\)"),
        ([[11]], [[1]], ValueError, "tokens must be 0 to 10, the vocabulary, got 11"),
        ([[1]], [[-1]], ValueError, "targets must be 0 to 10, the vocabulary, got -1"),
    ],
)
def test_tokens_that_cannot_be_are_refused(tokens, targets, error, reason):
    with pytest.raises(error, match=reason):
        gpt().train_step().inputs(Mesh(pp=1), tokens, targets)


def test_a_mesh_that_cannot_share_the_heads_is_refused_before_anything_is_sent():
    with pytest.raises(ValueError, match="4 query heads and 2 key-value heads cannot be shared"):
        gpt(heads=4, kv_heads=2, head_dim=2).train_step().inputs(Mesh(tp=4), [[1]], [[2]])
    with pytest.raises(ValueError, match=r"Mesh\(pp=1, cp=2\) also has 'cp' of size 2"):
        gpt().train_step().inputs(Mesh(pp=1, cp=2), [[1]], [[2]])
    with pytest.raises(ValueError, match="schedule 'inference' has forwards only, and cannot train"):
        gpt(pipeline=Pipeline(1, 1, "inference")).train_step()
