"""Texts that end the process which parses them: each is refused here, and this process goes on."""

from __future__ import annotations

import random
import re

import pytest

jax = pytest.importorskip("jax")

from jax_examples import EXAMPLES  # noqa: E402

from parallelism.interop import InteropError, from_stablehlo  # noqa: E402
from parallelism.interop.stablehlo import harmless  # noqa: E402
from parallelism.interop.stablehlo.bindings import artifact  # noqa: E402


def with_attribute(text, before=""):
    return f"{before}\nmodule attributes {{a = {text}}} {{ func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {{ " \
           "return %x : tensor<8xf32> } }"


def aliases(count, template):
    """Aliases, each of which names the one before."""
    return '#a0 = "x"\n' + "\n".join(f"#a{i} = {template.format(f'#a{i - 1}')}" for i in range(1, count))


MANUAL = """
sdy.mesh @one = <[], device_ids=[0]>
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@one, []>] out_shardings=[<@one, []>] manual_axes={}
      (%y: tensor<8xf32>) { sdy.return %y : tensor<8xf32> } : (tensor<8xf32>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}
"""

TEXTS = {
    "a sharding without dims": MANUAL,
    "its name is hidden": MANUAL.replace("sdy.manual_computation(%x) in_", '"sdy\\2Emanual_computation"(%x) in_'),
    "signs": with_attribute(f"affine_map<(d0) -> ({'-' * 100_000}d0)>"),
    "a sum": with_attribute(f"affine_map<(d0) -> ({'+'.join(['d0'] * 100_000)})>"),
    "aliases of aliases": with_attribute("#a99999", aliases(100_000, "[{0}]")),
    "an alias named twice": with_attribute("#a49", aliases(50, "[{0}, {0}]")),
    "brackets between strings": with_attribute(f'"\\"", b = {"[" * 100_000}1{"]" * 100_000}, c = "\\""'),
    "brackets after a comment": with_attribute(f'1 // "\n, b = {"[" * 100_000}1{"]" * 100_000}, c = "\\""'),
}


@pytest.mark.sampled(3, 1)
@pytest.mark.timeout(200)
@pytest.mark.slow_for("signs", "sum", "alias", "hidden")
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_would_end_the_process_is_one_error(name, monkeypatch):
    monkeypatch.setattr(harmless, "MOST_SECONDS", 5)
    with pytest.raises(InteropError, match=r"would end this process|nested more than 200 deep|MLIR|line \d+"):
        from_stablehlo(TEXTS[name])


def test_most_texts_are_judged_by_their_words(monkeypatch):
    """A child process would take half a second each time."""
    tried = []
    monkeypatch.setattr(harmless, "_try_apart", tried.append)
    for text in (with_attribute("1 : i32"), 'func.func @main() { "stablehlo.add"() : () -> () }  loc("p.w0")',
                 "func.func @f.a(%x.b: tensor<f8E4M3FN>) { %0 = stablehlo.constant dense<1.5e3> : tensor<f32> }"):
        harmless.check_harmless(text)
    assert tried == []
    for text in ("vector.shuffle", '"a\\2Eb"', "#a = 1", "affine_map", '"vector.shuffle"()', "sdy.all_gather"):
        harmless.check_harmless(text)
    assert len(tried) == 6


SEED = """
module @m attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @m = <["a"=2, "b"=2]>
  func.func public @main(
      %x: tensor<4x8xf32> {sdy.sharding = #sdy.sharding<@m, [{"a", "b"}, {?}]>}, %w: tensor<8x3xbf16>)
      -> (tensor<4x3xf32> {jax.result_info = "result"}) {
    %c = stablehlo.constant dense<[1.5, -2.0, 0x7FC0]> : tensor<3xbf16>
    %0 = stablehlo.convert %w : (tensor<8x3xbf16>) -> tensor<8x3xf32>
    %1 = stablehlo.dot_general %x, %0, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT]
        : (tensor<4x8xf32>, tensor<8x3xf32>) -> tensor<4x3xf32>
    %2 = sdy.sharding_constraint %1 <@m, [{"b"}, {}]> : tensor<4x3xf32>
    %3 = stablehlo.broadcast_in_dim %c, dims = [1] : (tensor<3xbf16>) -> tensor<4x3xbf16>
    %i = stablehlo.constant dense<0> : tensor<i32>
    %n = stablehlo.constant dense<3> : tensor<i32>
    %4:2 = stablehlo.while(%j = %i, %v = %2) : tensor<i32>, tensor<4x3xf32>
    cond {
      %p = stablehlo.compare LT, %j, %n, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %p : tensor<i1>
    } do {
      %s = stablehlo.sine %v : tensor<4x3xf32>
      %one = stablehlo.constant dense<1> : tensor<i32>
      %k = stablehlo.add %j, %one : tensor<i32>
      stablehlo.return %k, %s : tensor<i32>, tensor<4x3xf32>
    }
    %z = stablehlo.constant dense<0.0> : tensor<f32>
    %5 = stablehlo.pad %4#1, %z, low = [0, 1], high = [2, -1], interior = [0, 1] : (tensor<4x3xf32>, tensor<f32>)
        -> tensor<6x5xf32>
    %6 = stablehlo.slice %5 [0:4:1, 0:3:1] : (tensor<6x5xf32>) -> tensor<4x3xf32>
    %7:2 = "stablehlo.sort"(%6, %6) <{dimension = 1 : i64, is_stable = true}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>, %d: tensor<f32>, %e: tensor<f32>):
      %q = stablehlo.compare LT, %a, %b, TOTALORDER : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %q : tensor<i1>
    }) : (tensor<4x3xf32>, tensor<4x3xf32>) -> (tensor<4x3xf32>, tensor<4x3xf32>)
    return %7#1 : tensor<4x3xf32>
  }
}
"""
TOKEN = re.compile(r'[A-Za-z_][\w.]*|\d+|[%#@][\w.]+|"[^"]*"|\S|\s+')
STRANGE = (
    "-1", "99999999999999999999", "9223372036854775807", "?", "tensor<*xf32>", "complex<f32>", "i4", "xi4", "i0",
    "!stablehlo.token", "dense<>", "array<i64: 1>", "[]", "{}", "<", "affine_map<(d0) -> (d0)>", '"a"', "x" * 20_000,
    "f8E4M3FN", "xf8E8M0FNU", "tensor<9223372036854775807x9223372036854775807xf32>", "1" * 5000, "opaque<1>")


def changed(rng):
    """The text with up to three words left out, doubled, exchanged, or put in place of others."""
    words = TOKEN.findall(SEED)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, other = rng.randrange(len(words)), rng.randrange(len(words))
        match rng.randrange(5):
            case 0:
                del words[at]
            case 1:
                words.insert(at, words[other])
            case 2:
                words[at], words[other] = words[other], words[at]
            case 3:
                words[at] = rng.choice(STRANGE)
            case 4:
                words[at] = words[other]
    return "".join(words)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("count", [5, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_text_with_words_exchanged_gives_a_program_or_one_short_error(count):
    rng, read, longest = random.Random(count), 0, 0
    for _ in range(count):
        try:
            from_stablehlo(changed(rng), most_ops=2000)
            read += 1
        except InteropError as error:
            longest = max(longest, len(str(error)))
    assert read < count and 0 < longest < 1000


@pytest.mark.takes_seconds
def test_a_name_that_is_no_text_is_one_error():
    text = 'module attributes {a.b = {"na\\D0me" = 1 : i32}} { func.func @main() { return } }'
    with pytest.raises(InteropError, match="a string of the module is not UTF-8"):
        harmless.check_harmless(text)
    harmless.check_harmless(text.replace("D0", "C3\\A9"))


SEEDS = (
    SEED,
    """module {
      sdy.mesh @mesh = <["a"=2, "b"=4]>
      func.func @main(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {}]>}) -> tensor<8x4xf32> {
        %c = stablehlo.constant dense<[1.5, -2.0, 0.25, 3.0]> : tensor<4xbf16>
        %0 = stablehlo.convert %c : (tensor<4xbf16>) -> tensor<4xf32>
        %1 = stablehlo.broadcast_in_dim %0, dims = [1] : (tensor<4xf32>) -> tensor<8x4xf32>
        %2 = stablehlo.add %x, %1 {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"a", "b"}, {}]>]>} : tensor<8x4xf32>
        return %2 : tensor<8x4xf32>
      }
    }""",
    """module {
      func.func @main(%x: tensor<?x3xf32>, %i: tensor<i32>) -> tensor<?x3xf32> {
        %0 = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?x3xf32>) -> tensor<i32>
        %1 = stablehlo.reshape %0 : (tensor<i32>) -> tensor<1xi32>
        %c = stablehlo.constant dense<3> : tensor<1xi32>
        %2 = stablehlo.concatenate %1, %c, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
        %f = stablehlo.convert %i : (tensor<i32>) -> tensor<f32>
        %3 = stablehlo.dynamic_broadcast_in_dim %f, %2, dims = [] : (tensor<f32>, tensor<2xi32>) -> tensor<?x3xf32>
        %4 = stablehlo.multiply %x, %3 : tensor<?x3xf32>
        return %4 : tensor<?x3xf32>
      }
    }""")


def bytes_changed(content, rng):
    """Bytes set, left out or put in, or the end cut off."""
    content = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(content))
        match rng.choice(("set", "set", "bit", "cut", "put", "end")):
            case "set":
                content[place] = rng.randrange(256)
            case "bit":
                content[place] ^= 1 << rng.randrange(8)
            case "cut":
                del content[place:place + rng.randint(1, 4)]
            case "put":
                content.insert(place, rng.randrange(256))
            case "end" if rng.random() < 0.2:
                del content[max(place, 4):]
    return bytes(content)


def artifacts():
    """The last text, and functions of JAX, as portable artifacts."""
    yield artifact(SEEDS[2])
    for name in ("transformer block", "convolutions", "scatters", "sorting by two keys", "branches", "scan"):
        function, arguments = EXAMPLES[name]
        yield artifact(jax.jit(function).lower(*arguments).as_text())


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("kind", "count"), [("text", 5500), ("artifact", 1500)])
def test_a_module_with_bytes_changed_gives_a_program_or_one_short_error(kind, count):
    files = [text.encode() for text in SEEDS] if kind == "text" else [*artifacts()]
    rng, read, longest = random.Random(count), 0, 0
    for _ in range(count):
        try:
            from_stablehlo(bytes_changed(rng.choice(files), rng), most_ops=2000)
            read += 1
        except InteropError as error:
            longest = max(longest, len(str(error)))
    assert 0 < read < count and 0 < longest < 1000


@pytest.mark.slow
def test_one_child_reads_many_artifacts_and_another_one_follows_where_it_ended(monkeypatch):
    made, started = harmless._Child, []
    monkeypatch.setattr(harmless, "_Child", lambda: started.append(made()) or started[-1])
    harmless._children.clear()
    content = artifact(SEEDS[2])
    programs = [from_stablehlo(content) for _ in range(3)]
    assert len(started) == 1 and programs[0] == programs[2]
    started[0].process.kill()
    started[0].process.wait()
    assert from_stablehlo(content) == programs[0] and len(started) == 2
    with pytest.raises(InteropError, match="portable artifact cannot be read"):
        from_stablehlo(content[:-9])
    harmless._children.clear()      # the next test would ask one that has ended
    started[1].end()
