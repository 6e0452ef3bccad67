"""Files that are changed by chance give a program or one error: old opsets, com.microsoft, and what PyTorch wrote."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("onnx")

import test_onnx_as_shipped as shipped
import test_onnx_microsoft as microsoft
import test_onnx_microsoft_layers as layers

from parallelism.interop import InteropError, from_onnx


def originals():
    for opset, node, tensors in shipped.OLD:
        x = shipped.X[:, :1] if node.input[0] == "one" else shipped.X
        yield shipped.model([node], {node.input[0]: x}, list(node.output), tensors, opset).SerializeToString()
    for name, (arrays, attributes, expected) in microsoft.CASES.items():
        yield microsoft.model(name.split()[0], arrays, attributes, expected(*arrays).ndim).SerializeToString()
    for name, case in layers.CASES.items():
        yield layers.model(name.split()[0], *case)[0].SerializeToString()
    yield (Path(__file__).parents[2] / "data" / "onnx" / "gpt_loss_torchscript.onnx").read_bytes()


def changed(content, rng):
    content = bytearray(content)
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(len(content))
        match rng.choice(("set", "set", "set", "cut", "put")):
            case "set":
                content[place] = rng.randrange(256)
            case "cut":
                del content[place:place + rng.randint(1, 4)]
            case "put":
                content.insert(place, rng.randrange(256))
    return bytes(content)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_a_file_that_is_changed_by_chance_gives_a_program_or_one_error():
    rng, read, files, longest = random.Random(3), 0, [*originals()], 0
    for _ in range(30_000):
        try:
            from_onnx(changed(rng.choice(files), rng))
            read += 1
        except InteropError as error:
            longest = max(longest, len(str(error)))
    assert read > 300 and longest < 2000


def test_a_name_that_is_not_text_is_one_error():
    content = shipped.model([shipped.node("Relu", "x")], {"x": (2, 3)}).SerializeToString()
    with pytest.raises(InteropError, match="not UTF-8"):
        from_onnx(content.replace(b"my Relu", b"my \xffelu"))
    content = shipped.model([shipped.node("Relu", "x")], {"x": ("batch", 3)}).SerializeToString()
    with pytest.raises(InteropError, match="not UTF-8"):
        from_onnx(content.replace(b"batch", b"bat\xffh"))
