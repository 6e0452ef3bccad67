"""Whether a text of MLIR can be parsed in this process.  The parser ends the process where it calls itself too deep.

It does so for brackets, for signs and sums of affine maps, and for aliases of aliases; an alias that is named twice in
each of many others is, written out, longer than any memory.
"""

from __future__ import annotations

import re
import subprocess
import sys

from parallelism.interop.errors import InteropError

MOST_NESTED = 200
MOST_SECONDS, MOST_BYTES = 20, 8 * 2**30
"""What the process that tries a text may take: seconds, and one more for each MiB of text, and bytes of memory."""

_APART = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|->')
"""What has brackets that do not count: strings, comments and arrows, as the parser reads them from left to right."""
_RISKY = re.compile(r"affine_map|affine_set|[#!][A-Za-z_][\w$-]*\s*=")
"""What the parser calls itself for, other than brackets: affine maps, and definitions of aliases."""

_TRY = """import sys
from jax.interpreters import mlir; from jaxlib.mlir import ir
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
except (ImportError, ValueError, OSError):
    pass
content = sys.stdin.buffer.read().decode()
with mlir.make_ir_context() as context, ir.Location.unknown():
    context.enable_multithreading(False)
    try:
        module = ir.Module.parse(content)
    except (ir.MLIRError, ValueError):
        sys.exit(0)
    module.operation.get_asm(use_local_scope=True, enable_debug_info=True)
"""


def check_harmless(text: str) -> None:
    """`InteropError` if the parser cannot read a text without harm.

    Nearly every text is judged by its brackets.  One with affine maps or aliases is first read by a child process,
    with all aliases written out; that takes about half a second.
    """
    plain = _APART.sub(" ", text)
    if _deepest(plain) > MOST_NESTED:
        raise InteropError(f"brackets are nested more than {MOST_NESTED} deep")
    if _RISKY.search(plain):
        _try_apart(text)


def _deepest(plain: str) -> int:
    """How deep brackets are nested: the parser calls itself for each."""
    depth = deepest = 0
    for bracket in re.findall(r"[(\[{<>}\])]", plain):
        depth = depth + 1 if bracket in "([{<" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def _try_apart(text: str) -> None:
    """Let a child process read the text; it ends well for a text that is wrong, too, because this process says why."""
    content = text.encode("utf-8", "replace")
    limit = MOST_SECONDS + len(content) / 2**20
    try:
        done = subprocess.run([sys.executable, "-c", _TRY, str(MOST_BYTES)], input=content,
                              capture_output=True, timeout=limit)
    except subprocess.TimeoutExpired:
        raise InteropError(f"the text was not parsed in {limit:.0f} s: its aliases or affine maps are too deep, or "
                           "too long when written out") from None
    if done.returncode:
        raise InteropError("the parser of jaxlib cannot read the text: its aliases or affine maps are too deep, or too "
                           "long when written out")
