"""StableHLO as text and as artifacts: what is read, and what is said about broken files."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("jax")

from numpy.testing import assert_array_equal

from parallelism import TensorSharding, ir
from parallelism.interop import InteropError, UnsupportedError, from_stablehlo, mesh_of
from parallelism.interop.stablehlo.bindings import artifact

DOUBLED = """
module @doubled {
  func.func public @main(%x: tensor<2x3xf32>) -> tensor<3xf32> {
    %0 = call @twice(%x) : (tensor<2x3xf32>) -> tensor<2x3xf32>
    %cst = stablehlo.constant dense<0.0> : tensor<f32>
    %1 = stablehlo.reduce(%0 init: %cst) applies stablehlo.add across dimensions = [0]
        : (tensor<2x3xf32>, tensor<f32>) -> tensor<3xf32>
    return %1 : tensor<3xf32>
  }
  func.func private @twice(%x: tensor<2x3xf32>) -> tensor<2x3xf32> {
    %0 = stablehlo.add %x, %x : tensor<2x3xf32>
    return %0 : tensor<2x3xf32>
  }
}
"""


def in_main(body, arguments="%x: tensor<4xf32>", result="tensor<4xf32>"):
    return f"module {{ func.func public @main({arguments}) -> {result} {{\n{body}\n}} }}"


@pytest.mark.slow
def test_text_a_file_and_an_artifact_are_one_program(tmp_path):
    program = from_stablehlo(DOUBLED)
    assert [op.kind for op in program.ops] == ["add", "sum"]
    path = tmp_path / "doubled.mlir"
    path.write_text(DOUBLED)
    assert from_stablehlo(path) == from_stablehlo(str(path)) == program
    path.write_bytes(artifact(DOUBLED))
    again = from_stablehlo(path)
    assert [op.kind for op in again.ops] == ["add", "sum"]
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert_array_equal(ir.interpret(again, [x]).outputs[0], (x * 2).sum(0))


@pytest.mark.slow
def test_an_artifact_with_a_string_that_is_not_text_is_one_error():
    """It is read in a process of its own: the bindings end theirs."""
    content = artifact(DOUBLED.replace("doubled", "named_so"))
    broken = content.replace(b"named_so", b"nam\xd0d_so")
    assert broken != content
    with pytest.raises(InteropError, match=r"cannot be read|not UTF-8"):
        from_stablehlo(broken.replace(b"add", b"ad\xd0"))


def test_groups_that_are_named_by_axes_of_a_mesh_are_those_of_the_axes():
    axes = ", ".join(f'#stablehlo.axis_ref<name = "{name}">' for name in ("a", "c"))
    groups = f"#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [{axes}]>"
    text = in_main(f"""  %0 = "stablehlo.all_gather"(%x) <{{all_gather_dim = 0 : i64, use_global_device_ids,
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, replica_groups = {groups}}}>
      : (tensor<4xf32>) -> tensor<16xf32>
      return %0 : tensor<16xf32>""", result="tensor<16xf32>").replace(
          "module {", 'module attributes {mhlo.num_partitions = 8 : i32} { sdy.mesh @mesh = <["a"=2, "b"=2, "c"=2]>')
    program = from_stablehlo(text)
    assert [(op.kind, op["axes"]) for op in program.program(0).ops] == [("all_gather", ("a", "c"))]
    with pytest.raises(InteropError, match=r"all_gather at line 2.*mesh symbol 'other' not found"):
        from_stablehlo(text.replace("mesh = @mesh", "mesh = @other"))


def test_a_module_whose_number_of_devices_is_none_is_one_error():
    text = DOUBLED.replace("module @doubled {", 'module @doubled attributes {mhlo.num_partitions = "four"} {')
    with pytest.raises(InteropError, match=r"mhlo\.num_partitions must be a number from 1 on, got four"):
        from_stablehlo(text)


def of_sub_axes(first='"x":(1)2', second='"x":(2)2', size=4):
    return f"""module {{
      sdy.mesh @m = <["x"={size}, "y"=2, "x_0"=1]>
      func.func @main(%a: tensor<8x4xf32> {{sdy.sharding = #sdy.sharding<@m, [{{{first}, "y"}}, {{{second}}}]>}})
          -> tensor<8x4xf32> {{
        %c = sdy.constant dense<2.0> : tensor<8x4xf32>
        %0 = stablehlo.multiply %a, %c : tensor<8x4xf32>
        %1 = sdy.sharding_constraint %0 <@m, [{{"x"}}, {{"y"}}]> : tensor<8x4xf32>
        return %1 : tensor<8x4xf32>
      }}
    }}"""


@pytest.mark.takes_seconds
def test_an_axis_that_is_taken_apart_is_several_axes():
    program = from_stablehlo(of_sub_axes())
    assert mesh_of(of_sub_axes()).shape == {"x_0_": 2, "x_1_": 2, "y": 2, "x_0": 1}
    assert program.inputs[0].layout == TensorSharding(("x_0_", "y"), "x_1_")
    assert program.outputs[0].layout == TensorSharding(("x_0_", "x_1_"), "y")
    assert [op.kind for op in program.ops] == ["constant", "multiply", "reshard"]
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    assert_array_equal(ir.interpret(program, [x]).outputs[0], 2 * x)
    three = from_stablehlo(of_sub_axes('"x":(2)2', '"x":(8)3', 24))
    assert three.inputs[0].layout == TensorSharding(("x_1_", "y"), "x_3_")
    assert three.outputs[0].layout == TensorSharding(("x_0_", "x_1_", "x_2_", "x_3_"), "y")


def test_parts_of_an_axis_that_overlap_are_refused():
    with pytest.raises(UnsupportedError, match="the sub-axes of 'x', which has 6 devices, do not lie in each other"):
        from_stablehlo(of_sub_axes('"x":(1)2', '"x":(3)2', 6))


def test_what_xla_adds_when_it_compiles_is_read():
    """A fusion, a copy, and memory read in another shape: the first has the rows of (3, 2), the columns of (2, 3)."""
    text = in_main("""  %0 = "mhlo.fusion"(%x) <{fusion_kind = #mhlo<fusion_kind kLoop>}> ({
      ^bb0(%a: tensor<2x3xf32>):
      %b = stablehlo.add %a, %a : tensor<2x3xf32>
      mhlo.return %b : tensor<2x3xf32>
    }) : (tensor<2x3xf32>) -> tensor<2x3xf32>
    %1 = mhlo.copy %0 : tensor<2x3xf32>
    %2 = mhlo.bitcast %1 {source_layout = dense<[1, 0]> : tensor<2xindex>,
                          result_layout = dense<[0, 1]> : tensor<2xindex>} : (tensor<2x3xf32>) -> tensor<3x2xf32>
    %3 = mhlo.bitcast %2 {source_layout = dense<[0, 1]> : tensor<2xindex>,
                          result_layout = dense<0> : tensor<1xindex>} : (tensor<3x2xf32>) -> tensor<6xi32>
    return %2, %3 : tensor<3x2xf32>, tensor<6xi32>""", "%x: tensor<2x3xf32>", "(tensor<3x2xf32>, tensor<6xi32>)")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    turned, flat = ir.interpret(from_stablehlo(text), [x]).outputs
    assert_array_equal(turned, (x * 2).T)
    assert_array_equal(flat, (x * 2).reshape(-1).view(np.int32))


@pytest.mark.parametrize(("body", "error", "message"), [
    ("  %0 = stablehlo.add %x, %y : tensor<4xf32>\n  return %0 : tensor<4xf32>", InteropError,
     r"line 2, column 26: use of undeclared SSA value name"),
    ("  %0 = stablehlo.frobnicate %x : tensor<4xf32>\n  return %0 : tensor<4xf32>", InteropError, "line 2"),
    ("  return %x : tensor<3xf32>", InteropError, "line 2"),
    ("  %0 = stablehlo.custom_call @lapack_sgetrf(%x) : (tensor<4xf32>) -> tensor<4xf32>\n"
     "  return %0 : tensor<4xf32>",
     UnsupportedError, r"stablehlo.custom_call at line 2, column \d+: the custom call 'lapack_sgetrf' is not"),
    ("  %0 = stablehlo.fft %x, type = RFFT, length = [4] : (tensor<4xf32>) -> tensor<3xcomplex<f32>>\n"
     "  %1 = stablehlo.tanh %0 : tensor<3xcomplex<f32>>\n  return %x : tensor<4xf32>", UnsupportedError,
     r"stablehlo.tanh at line 3, column \d+: it is not supported for complex numbers"),
    ('  %s = stablehlo.constant dense<[1, 2]> : tensor<2xui64>\n'
     '  %0:2 = "stablehlo.rng_bit_generator"(%s) <{rng_algorithm = '
     "#stablehlo<rng_algorithm DEFAULT>}> : (tensor<2xui64>) -> (tensor<2xui64>, tensor<4xui32>)\n"
     "  return %x : tensor<4xf32>", UnsupportedError, "DEFAULT gives other bits on each machine"),
    ("  %0 = stablehlo.uniform_quantize %x : (tensor<4xf32>) -> tensor<4x!quant.uniform<i8:f32, 0.5:3>>\n"
     "  return %x : tensor<4xf32>", UnsupportedError, r"^line 2, column \d+: types of the dialect quant are not supported$"),
])
def test_what_is_wrong_is_named_with_its_place(body, error, message):
    with pytest.raises(error, match=message):
        from_stablehlo(in_main(body))


@pytest.mark.parametrize(("content", "message"), [
    ("module {", "line 1"),
    (b"\x00\xff\xfe{", "neither text in UTF-8 nor a portable artifact"),
    pytest.param(b"ML\xefR\x01Stable", "portable artifact cannot be read", marks=pytest.mark.slow),   # as above
    ("module { }", "must have a function @main"),
    ("module { " + "(" * 5000 + " }", "nested more than 200 deep"),
    (in_main("  %0 = func.call @main(%x) : (tensor<4xf32>) -> tensor<4xf32>\n  return %0 : tensor<4xf32>"),
     "calls itself"),
    (in_main("  %0 = stablehlo.convolution(%x, %x) dim_numbers = [b, f, 9223372036854775807]x[o, i, 0]->[b, f, 0], "
             "window = {} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : "
             "(tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>\n  return %0 : tensor<4xf32>"), "cannot be parsed"),
    (in_main("  return %x : tensor<*xf32>", "%x: tensor<*xf32>", "tensor<*xf32>"), "tensor<\\*xf32>"),
])
def test_a_file_that_is_no_module_gives_one_error(content, message):
    with pytest.raises(InteropError, match=message):
        from_stablehlo(content)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_text_that_is_changed_by_chance_gives_a_program_or_one_error():
    rng, read = random.Random(5), 0
    for _ in range(2500):
        text = list(DOUBLED)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text))
            match rng.randrange(4):
                case 0:
                    text[at] = rng.choice("%@<>(){}[]=:,x 019abf-\"#!")
                case 1:
                    del text[at:at + rng.randint(1, 9)]
                case 2:
                    text[at:at] = rng.choices(text, k=rng.randint(1, 9))
                case 3:
                    del text[at:]
            if not text:
                break
        try:
            from_stablehlo("".join(text) + "\n")
            read += 1
        except InteropError:
            pass
    assert 0 < read < 2500


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_text_is_no_module(text):
    with pytest.raises(InteropError, match="must be a text or the path of a file, got an empty text"):
        from_stablehlo(text)
