"""The perceptron in one process, which the pipelined one is compared with; and what is refused on the host."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from parallelism.mesh import Mesh
from parallelism.pipelining import Pipeline, pipeline_axes
from pipeline_parallelism import MLP, SGD, Adam, Training

SIZES = (5, 4, 6, 3)
CLASSES = "softmax_cross_entropy"


def mlp_of(stages=1, microbatches=1, **options):
    return MLP(layer_sizes=SIZES, pipeline=Pipeline(stages, microbatches), **options)


def batch(loss="mean_squared_error", rows=7):
    rng = np.random.default_rng(4)
    x = rng.standard_normal((rows, SIZES[0]))
    return x, rng.integers(0, SIZES[-1], rows) if loss == CLASSES else rng.standard_normal((rows, SIZES[-1]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu", "identity"])
@pytest.mark.parametrize("loss", ["mean_squared_error", CLASSES])
def test_gradients_are_the_central_differences_of_the_loss(activation, loss):
    mlp = mlp_of(activation=activation, loss=loss)
    x, targets = batch(loss)
    parameters = mlp.initial_parameters()
    for _, bias in parameters:
        bias += 0.1  # a row that is dead in one layer would sit on the kink of relu in the next
    step = mlp.reference_step(x, targets, previous=Training(0.0, parameters, None))
    assert step.loss == mlp.loss_function(mlp.forward(parameters, x), targets, len(x))[0]
    for pair, gradients in zip(parameters, step.gradients, strict=True):
        for array, gradient in zip(pair, gradients, strict=True):
            for i in list(np.ndindex(array.shape))[::3]:
                losses, value = [], array[i]
                for step_size in (1e-6, -1e-6):
                    array[i] = value + step_size
                    losses.append(mlp.loss_function(mlp.forward(parameters, x), targets, len(x))[0])
                array[i] = value
                assert gradient[i] == pytest.approx((losses[0] - losses[1]) / 2e-6, abs=1e-7)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, momentum=0.9), Adam(0.01)])
@pytest.mark.parametrize(("microbatches", "replicas"), [(3, 1), (9, 1), (1, 2), (2, 3)])
def test_parts_of_the_batch_add_up_to_the_batch_over_several_steps(optimizer, microbatches, replicas):
    mlp, (x, targets) = mlp_of(), batch()
    whole = parts = None
    for _ in range(4):
        whole = mlp.reference_step(x, targets, optimizer, previous=whole)
        parts = mlp.reference_step(x, targets, optimizer, previous=parts, microbatches=microbatches, replicas=replicas)
        assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    for pair, expected in zip(parts.parameters + parts.gradients, whole.parameters + whole.gradients, strict=True):
        for array, value in zip(pair, expected, strict=True):
            assert_allclose(array, value, rtol=1e-10, atol=1e-13)


def test_a_layer_draws_the_same_however_the_layers_are_dealt():
    whole = mlp_of().initial_parameters()
    parts = mlp_of(3)
    for stage in range(3):
        layers = parts.layers_of(stage)
        for i, (weights, bias) in zip(layers, parts.initial_layers(layers), strict=True):
            assert_array_equal(weights, whole[i][0])
            assert_array_equal(bias, np.zeros(SIZES[i + 1]))
    assert not np.array_equal(whole[0][0], mlp_of(seed=1).initial_parameters()[0][0])


@pytest.mark.parametrize("layers", range(1, 8))
def test_layers_are_dealt_in_order_and_as_even_as_can_be(layers):
    for stages in range(1, layers + 1):
        mlp = MLP(layer_sizes=(2,) * (layers + 1), pipeline=Pipeline(stages, 1))
        dealt = [list(mlp.layers_of(stage)) for stage in range(stages)]
        assert dealt == [part.tolist() for part in np.array_split(np.arange(layers), stages)]


def test_the_last_layer_is_linear_and_the_others_are_not():
    mlp = MLP(layer_sizes=(1, 1, 1), pipeline=Pipeline(1, 1))
    layers = [(np.array([[-1.0]]), np.zeros(1)), (np.array([[-1.0]]), np.zeros(1))]
    assert_array_equal(mlp.forward(layers, [[2.0], [-3.0]]), [[0], [-3]])


def test_an_mlp_is_a_value():
    mlp = MLP(layer_sizes=list(SIZES), pipeline=Pipeline(2, 4), dtype="float32")
    assert pickle.loads(pickle.dumps(mlp)) == mlp  # noqa: S301
    assert hash(mlp) == hash(MLP(layer_sizes=SIZES, pipeline=Pipeline(2, 4), dtype=np.float32))
    assert mlp != MLP(layer_sizes=SIZES, pipeline=Pipeline(2, 4))
    assert {array.dtype for pair in mlp.initial_parameters() for array in pair} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline": Pipeline(4, 1)}, r"4 stages need a layer each; layer_sizes=\(5, 4, 6, 3\) makes 3 layers"),
        ({"layer_sizes": (5,)}, r"two or more integers of at least 1, got \(5,\)"),
        ({"layer_sizes": (5, 0)}, r"two or more integers of at least 1, got \(5, 0\)"),
        ({"activation": "rely"}, "unknown activation 'rely'; did you mean 'relu'"),
        ({"loss": "mse"}, r"unknown loss 'mse'.*\(known: 'mean_squared_error', 'softmax_cross_entropy'\)"),
        ({"dtype": np.int32}, "floating one, got int32"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_a_model_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MLP(**{"layer_sizes": SIZES, "pipeline": Pipeline(1, 1), **options})


def spoilt(value):
    x, _ = batch()
    x[3, 2] = value
    return x


@pytest.mark.parametrize(
    ("loss", "x", "targets", "message"),
    [
        ("mean_squared_error", spoilt(np.nan), batch()[1], "x must be finite, got nan in row 3, column 2"),
        ("mean_squared_error", spoilt(np.inf), batch()[1], "x must be finite, got inf in row 3, column 2"),
        ("mean_squared_error", np.zeros((2, 4)), batch()[1], r"x must have shape \(rows, 5\), got \(2, 4\)"),
        ("mean_squared_error", np.zeros(5), batch()[1], r"x must have shape \(rows, 5\), got \(5,\)"),
        ("mean_squared_error", np.zeros((0, 5)), np.zeros((0, 3)), "at least one row"),
        ("mean_squared_error", np.zeros((2, 5)), np.zeros((3, 3)), "x has 2 rows and targets 3"),
        ("mean_squared_error", np.zeros((2, 5)), np.zeros(2, int), r"targets must have shape \(rows, 3\), got \(2,\)"),
        ("mean_squared_error", np.zeros((1, 5)), [[0, 1, np.nan]], "targets must be finite, got nan in row 0, column"),
        (CLASSES, np.zeros((2, 5)), [0, 3], "classes 0 to 2, got 3"),
        (CLASSES, np.zeros((2, 5)), [0, -1], "classes 0 to 2, got -1"),
        (CLASSES, np.zeros((2, 5)), [0.0, 1.0], "must be integers, got float64"),
    ],
)
def test_data_that_do_not_fit_are_refused_before_anything_runs(loss, x, targets, message):
    mlp = mlp_of(loss=loss)
    for use in (mlp.reference_step, lambda x, t: mlp.train_step().inputs(Mesh(pp=1), x, t)):
        with pytest.raises(ValueError, match=message):
            use(x, targets)


def test_numbers_that_are_not_real_are_refused():
    with pytest.raises(TypeError, match="x must hold real numbers, got complex128"):
        mlp_of().check_inputs(np.zeros((2, 5), complex))


@pytest.mark.parametrize(
    ("mesh", "stages", "axes"),
    [
        (Mesh(pp=3), 3, ("pp", ())),
        (Mesh(devices=3), 3, ("devices", ())),
        (Mesh(dp=2, pp=3), 3, ("pp", ("dp",))),
        (Mesh(pp=3, dp=2), 3, ("pp", ("dp",))),
        (Mesh(dp=3), 3, ("dp", ())),
        (Mesh(dp=3), 1, (None, ("dp",))),
        (Mesh(dp=2, tp=1), 1, (None, ("dp",))),
        (Mesh(pp=2, tp=1), 2, ("pp", ())),
        (Mesh(devices=1), 1, ("devices", ())),
    ],
)
def test_stages_lie_on_pp_and_replicas_on_dp(mesh, stages, axes):
    assert pipeline_axes(Pipeline(stages, 2), mesh) == axes


def test_axes_inside_a_stage_may_have_any_size():
    assert pipeline_axes(Pipeline(3, 2), Mesh(pp=3, dp=2, tp=2), inside=["tp"]) == ("pp", ("dp",))
    assert pipeline_axes(Pipeline(1, 2), Mesh(tp=2), inside=["tp"]) == (None, ())


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (Mesh(pp=3), r"takes 2 ranks on axis 'pp'; Mesh\(pp=3\) has axis 'pp' of size 3"),
        (Mesh(devices=4), r"takes 2 ranks on axis 'pp'; Mesh\(devices=4\) has axis 'devices' of size 4"),
        (Mesh(dp=2, tp=2), r"takes 2 ranks on axis 'pp'; Mesh\(dp=2, tp=2\) has no axis 'pp'"),
        (Mesh(pp=2, tp=3), r"Mesh\(pp=2, tp=3\) also has 'tp' of size 3"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_on_the_host(mesh, message):
    step = mlp_of(2, 2).train_step(optimizer=SGD(0.1))
    with pytest.raises(ValueError, match=message):
        step.inputs(mesh, *batch())
    with pytest.raises(ValueError, match=message):
        mlp_of(2, 2).predict_step().inputs(mesh, batch()[0])


def test_only_the_first_stage_gets_the_inputs_and_only_the_last_the_targets():
    x, targets = batch()
    dealt = mlp_of(3, 2).train_step().inputs(Mesh(dp=2, pp=3), x, targets)
    assert [(a is None, b is None, rows, whole) for a, b, rows, whole in dealt] == [
        (False, True, 4, 7), (True, True, 4, 7), (True, False, 4, 7),
        (False, True, 3, 7), (True, True, 3, 7), (True, False, 3, 7),
    ]  # fmt: skip
    assert_array_equal(np.concatenate([dealt[0][0], dealt[3][0]]), x)
    assert_array_equal(np.concatenate([dealt[2][1], dealt[5][1]]), targets)


def test_arguments_of_a_step_are_checked():
    with pytest.raises(ValueError, match="returns may name loss, parameters, gradients; got 'weights'"):
        mlp_of().train_step(returns=("loss", "weights"))
    with pytest.raises(TypeError, match="optimizer must be one, such as SGD"):
        mlp_of().train_step(optimizer=0.1)
    with pytest.raises(TypeError, match="takes x and targets, got 1"):
        mlp_of().train_step().inputs(Mesh(pp=1), batch()[0])
    with pytest.raises(TypeError, match="takes x alone, got 2"):
        mlp_of().predict_step().inputs(Mesh(pp=1), *batch())
