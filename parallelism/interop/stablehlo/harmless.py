"""Whether a text of MLIR can be parsed in this process: some texts end the process that parses them.

The parser calls itself for brackets, for signs and sums of affine maps, and for aliases of aliases; an alias that is
named twice in each of many others is, written out, longer than any memory.  The verifier of Shardy reads past the dims
of a sharding.
"""

from __future__ import annotations

import re
import subprocess
import sys

from parallelism.interop.errors import InteropError

MOST_NESTED = 200
MOST_SECONDS, MOST_BYTES = 20, 8 * 2**30
"""What the process that tries a text may take: seconds of computing (one more for each MiB of text), and bytes."""

_APART = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|->')
"""What has brackets that do not count: strings, comments and arrows, as the parser reads them from left to right."""
_PLACE = re.compile(r'loc\("[^"\\\n]*"')
_ALIAS = re.compile(r"[#!][A-Za-z_][\w$-]*\s*=")
_WORD = re.compile(r"(?<![\w@%.$-])([A-Za-z_]\w*)(?:\.([A-Za-z_]\w*))")
_KNOWN = frozenset(("stablehlo", "chlo", "func", "mhlo", "jax", "tf"))
_KNOWN_OF_SHARDY = frozenset(("mesh", "sharding", "sharding_per_value", "sharding_constraint", "return"))
"""What was parsed with 20,000 random mistakes, and ended no process; see the tests."""

_TRY = """import sys; from jax.interpreters import mlir; from jaxlib.mlir import ir
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]), int(sys.argv[2])))
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

    Most texts are judged by their brackets and words.  One with affine maps, aliases, or ops of other dialects is
    first read by a child process, with all aliases written out; that takes about half a second.
    """
    plain = _APART.sub(" ", text)
    if _deepest(plain) > MOST_NESTED:
        raise InteropError(f"brackets are nested more than {MOST_NESTED} deep")
    if _is_risky(text, plain):
        _try_apart(text)


def _is_risky(text: str, plain: str) -> bool:
    """Whether a text has more than what is known to be harmless.  An escape in a string may hide the name of an op."""
    if "\\" in text or "affine_" in plain or _ALIAS.search(plain):
        return True
    for dialect, name in set(_WORD.findall(_PLACE.sub("", text))):
        if dialect not in _KNOWN and not (dialect == "sdy" and name in _KNOWN_OF_SHARDY):
            return True
    return False


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
    limit = MOST_SECONDS + len(content) // 2**20
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRY, str(MOST_BYTES), str(limit)],
            input=content,
            capture_output=True,
            timeout=6 * limit,
        )
    except subprocess.TimeoutExpired:
        raise InteropError(f"the text was not parsed in {6 * limit} s") from None
    if done.returncode:
        raise InteropError(
            f"the parser of jaxlib would end this process, or take more than {limit} s, for the text: "
            "its aliases or affine maps are too deep, or a sharding does not fit its tensor"
        )
