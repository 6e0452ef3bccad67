"""Resize of ONNX: equal to ONNX's reference in every mode, and refused by name where it is not read."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from numpy.testing import assert_allclose, assert_array_equal  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from parallelism import ir  # noqa: E402
from parallelism.interop import InteropError, UnsupportedError, from_onnx, to_onnx  # noqa: E402

MODES = {"nearest": {"nearest_mode": "round_prefer_ceil"}, "linear": {"antialias": 1}, "cubic": {"exclude_outside": 1}}
COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric",
               "tf_crop_and_resize")
ROI = np.array([0.25, 0, 0.75, 1.5], np.float32)


def resize(shape, dtype=TensorProto.FLOAT, *, roi=None, scales=None, sizes=None, **attributes):
    given = {"roi": (roi, np.float32), "scales": (scales, np.float32), "sizes": (sizes, np.int64)}
    tensors = [numpy_helper.from_array(np.array(numbers, kind), name) for name, (numbers, kind) in given.items()
               if numbers is not None]
    names = ["x", *(name if numbers is not None else "" for name, (numbers, _) in given.items())]
    node = helper.make_node("Resize", names, ["y"], name="mine", **attributes)
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info("y", dtype, [f"n{d}" for d in range(len(shape))])], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def both(model, x):
    """The result, and that of the reference."""
    program, weights = from_onnx(model)
    assert weights == {} and [value.name for value in program.inputs] == ["x"]
    return ir.interpret(program, {"x": x}).outputs[0], ReferenceEvaluator(model).run(None, {"x": x})[0]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wanted", [
    {"scales": [1.5, 0.625]}, {"scales": [0.4, 2]}, {"sizes": [1, 7]}, {"sizes": [9, 3]},
    {"sizes": [8, 9], "keep_aspect_ratio_policy": "not_larger"},
    {"sizes": [3, 9], "keep_aspect_ratio_policy": "not_smaller"}], ids=str)
def test_every_mode_equals_the_reference(coordinates, mode, wanted):
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 6), np.float32)
    roi = ROI if coordinates == "tf_crop_and_resize" else None
    found, expected = both(resize(x.shape, roi=roi, mode=mode, coordinate_transformation_mode=coordinates, axes=[1, 3],
                                  extrapolation_value=7.5, **MODES[mode], **wanted), x)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("nearest_mode", "places"), [       # of 0, 2/3, 4/3 and 2
    ("round_prefer_floor", [0, 1, 1, 2]), ("floor", [0, 0, 1, 2]), ("ceil", [0, 1, 2, 2])])
def test_the_nearest_element_is_picked_in_any_dtype(nearest_mode, places):
    large = np.array([[2**62 + 1, 5, -7]])
    for x in (large, large == 5):
        program, _ = from_onnx(resize(
            x.shape, helper.np_dtype_to_tensor_dtype(x.dtype), scales=[1, 1.5], mode="nearest",
            coordinate_transformation_mode="asymmetric", nearest_mode=nearest_mode))
        found, = ir.interpret(program, {"x": x}).outputs
        assert_array_equal(found, x[:, places])
        assert found.dtype == x.dtype


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.float16, np.float64])
def test_sums_are_rounded_once_and_brought_into_the_range(dtype):
    x = np.array([[0, 255, 255, 0, 3, 40]]).astype(dtype)
    found, expected = both(resize(x.shape, helper.np_dtype_to_tensor_dtype(x.dtype), sizes=[1, 11], mode="cubic"), x)
    assert found.dtype == dtype
    # The reference has some of its weights in float32.
    assert_allclose(found, expected, rtol=1e-3 if dtype == np.float16 else 1e-5)
    if dtype == np.uint8:
        assert found.max() == 255           # the cubic overshoots


def test_an_integer_of_eight_bytes_stays_in_its_range():
    top = np.iinfo(np.int64).max
    program, _ = from_onnx(resize([6], TensorProto.INT64, sizes=[11], mode="cubic"))
    found, = ir.interpret(program, {"x": np.array([0, top, top, 0, 0, -top])}).outputs
    assert found.max() == top and found.min() == np.iinfo(np.int64).min


def test_dims_that_stay_may_be_symbols():
    program, _ = from_onnx(resize(["batch", 3, 4], scales=[1, 1, 2], mode="linear"))
    assert str(program.outputs[0].type) == "tensor<(batch)x3x8xf32>"
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    model = resize(x.shape, scales=[1, 1, 2], mode="linear")
    expected, = ReferenceEvaluator(model).run(None, {"x": x})
    assert_allclose(ir.interpret(program, {"x": x}).outputs[0], expected, rtol=1e-6)
    again = to_onnx(from_onnx(model).program)
    assert_allclose(ReferenceEvaluator(again).run(None, {"x": x})[0], expected, rtol=1e-6)


def test_numbers_that_are_not_finite_stay_where_they_are():
    x = np.array([1, np.inf, 3, 4, 5, 6, 7], np.float32)
    program, _ = from_onnx(resize(x.shape, sizes=[14], mode="linear"))
    found, = ir.interpret(program, {"x": x}).outputs
    assert np.flatnonzero(~np.isfinite(found)).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(("shape", "options", "error", "message"), [
    ([2, "n"], {"scales": [1, 2]}, UnsupportedError, "dim 1 is resized, so its extent must be a number, got n"),
    ([3], {"scales": [0.2]}, UnsupportedError, "a dim of 3 elements cannot be resized to 0"),
    ([3], {"scales": [-1]}, InteropError, "Resize"),
    ([3], {"sizes": [2**40]}, UnsupportedError, "too many: at most 262144 in all"),
    ([2**30], {"sizes": [1], "mode": "linear", "antialias": 1}, UnsupportedError, "too many"),
    ([3], {"sizes": [4], "coordinate_transformation_mode": "tf_crop_and_resize"}, InteropError, "needs roi"),
    ([3], {"sizes": [4], "coordinate_transformation_mode": "tf_crop_and_resize", "roi": [0, np.nan]}, InteropError,
     "must give places near dim 0, got nan"),
    ([3], {"sizes": [4], "mode": "area"}, InteropError, "mode must be nearest, linear or cubic, got 'area'"),
    ([3], {"sizes": [4], "nearest_mode": "up"}, InteropError, "nearest_mode must be"),
    ([3], {"sizes": [4], "coordinate_transformation_mode": "half"}, UnsupportedError, "'half' is not supported"),
    ([3], {"sizes": [4], "antialias": 1}, UnsupportedError, "antialias=1 needs"),
    ([3], {}, InteropError, "Resize"),
])
def test_what_is_not_read_is_refused_by_name(shape, options, error, message):
    model = resize(shape, **options)
    with pytest.raises(error, match=message) as caught:
        from_onnx(model)
    assert "Resize" in str(caught.value)


def test_bools_have_no_sums():
    with pytest.raises(UnsupportedError, match="Resize 'mine' at the node of y: bools have no sums"):
        from_onnx(resize([3], TensorProto.BOOL, sizes=[5], mode="linear"))


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_is_the_transposed_map(mode):
    program, _ = from_onnx(resize([3, 5], scales=[2, 0.6], mode=mode))
    rng = np.random.default_rng(0)
    x, g = (rng.standard_normal(shape, np.float32) for shape in ((3, 5), (6, 3)))
    y, = ir.interpret(program, {"x": x}).outputs
    back, = ir.interpret(ir.gradient(program), {"x": x, "grad.0": g}).outputs
    assert back.shape == x.shape
    assert_allclose((y * g).sum(), (x * back).sum(), rtol=1e-4)
