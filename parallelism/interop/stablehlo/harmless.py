"""Whether a text of MLIR can be parsed in this process: some texts end the process that parses them.

The parser calls itself for brackets, for signs and sums of affine maps, and for aliases of aliases; an alias that is
named twice in each of many others is, written out, longer than any memory.  The verifier of Shardy reads past the dims
of a sharding.
"""

from __future__ import annotations

import atexit
import os
import re
import struct
import subprocess
import sys
import threading
from contextlib import suppress

from parallelism.interop.errors import InteropError

MOST_NESTED = 200
MOST_SECONDS, MOST_BYTES = 20, 8 * 2**30
"""What the process that tries a text may take: seconds of computing (one more for each MiB of text), and bytes."""

_APART = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|->')
"""What has brackets that do not count: strings, comments and arrows, as the parser reads them from left to right."""
_ESCAPED = re.compile(r'"((?:[^"\\\n]|\\.)*\\[89A-Fa-f][0-9A-Fa-f](?:[^"\\\n]|\\.)*)"')
"""A string with bytes that are no ASCII, by their numbers."""
_BYTE = re.compile(rb"\\([0-9A-Fa-f]{2})")
_PLACE = re.compile(r'loc\("[^"\\\n]*"')
_ALIAS = re.compile(r"[#!][A-Za-z_][\w$-]*\s*=")
_WORD = re.compile(r"(?<![\w@%.$-])([A-Za-z_]\w*)(?:\.([A-Za-z_]\w*))")
_KNOWN = frozenset(("stablehlo", "chlo", "func", "mhlo", "jax", "tf"))
_KNOWN_OF_SHARDY = frozenset(("mesh", "sharding", "sharding_per_value", "sharding_constraint", "return"))
"""What was parsed with 20,000 random mistakes, and ended no process; see the tests."""

_CHILD = """import os, select, struct, sys; from jax.interpreters import mlir; from jaxlib.mlir import ir, dialects
most_bytes, idle_seconds = map(int, sys.argv[1:])
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
except (ImportError, ValueError, OSError):
    resource = None

def taken(count):
    data = b""
    while len(data) < count:
        if sys.platform != "win32" and not select.select([0], [], [], idle_seconds)[0]: sys.exit(0)
        piece = os.read(0, min(count - len(data), 1 << 20))
        if not piece: sys.exit(0)
        data += piece
    return data

def text_of_artifact(content):
    with mlir.make_ir_context() as context, ir.Location.unknown():
        try:
            with context.attach_diagnostic_handler(lambda _: True):
                module = dialects.stablehlo.deserialize_portable_artifact(context, content)
        except (ValueError, ir.MLIRError):
            module = ir.Module.parse(content)
        return module.operation.get_asm(binary=True, enable_debug_info=True)

def tried(content):
    with mlir.make_ir_context() as context, ir.Location.unknown():
        context.enable_multithreading(False)
        try:
            module = ir.Module.parse(content.decode())
        except (ir.MLIRError, ValueError):
            return b""
        module.operation.get_asm(use_local_scope=True, enable_debug_info=True)
        return b""

answers, out = {b"a": text_of_artifact, b"t": tried}, os.fdopen(os.dup(1), "wb")
while True:
    kind, seconds, length = struct.unpack("<cqq", taken(17))
    content = taken(length)
    if resource is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    try:
        good, answer = 1, answers[kind](content)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        good, answer = 0, lines[-1].encode("utf-8", "replace")
    out.write(struct.pack("<qq", good, len(answer)) + answer)
    out.flush()
"""
IDLE_SECONDS = 20
"""So long the child waits for the next module, before it ends."""


class Ended(Exception):
    """The child ended while it read a module, or took too long."""


class _Child:
    """A process that reads modules for this one, one after another: a broken one may end it, and another one is started."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(MOST_BYTES), str(IDLE_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.parent = os.getpid()
        atexit.register(self.end)

    def end(self) -> None:
        """Ends the process.  It may have ended before.  A copy of the parent leaves it alone."""
        atexit.unregister(self.end)
        if self.parent != os.getpid():
            return
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()

    def answer(self, kind: bytes, content: bytes, seconds: int) -> tuple[bool, bytes]:
        """Whether it could be read, and what was read, or why not.  `Ended` if it ended the child."""
        assert self.process.stdin is not None
        late = threading.Timer(6 * seconds, self.process.kill)
        late.daemon = True
        late.start()
        try:
            self.process.stdin.write(struct.pack("<cqq", kind, seconds, len(content)) + content)
            self.process.stdin.flush()
            good, length = struct.unpack("<qq", self._taken(16))
            return bool(good), self._taken(length)
        except OSError as error:
            raise Ended from error
        finally:
            late.cancel()

    def _taken(self, count: int) -> bytes:
        assert self.process.stdout is not None
        data = self.process.stdout.read(count)
        if len(data) < count:
            raise Ended
        return data


_children: dict[int, _Child] = {}
_asking: dict[int, threading.Lock] = {}
"""By process: a copy of this one has a child and a lock of its own."""


def by_child(kind: bytes, content: bytes, seconds: int) -> tuple[bool, bytes]:
    """What the child says of a module: ``b"a"`` is a portable artifact, whose text is the answer, ``b"t"`` a text.

    `Ended` if it takes more than so many seconds of computing, or ends the child.
    """
    process = os.getpid()
    with _asking.setdefault(process, threading.Lock()):
        own = _children.pop(process, None)
        if own is not None:
            with suppress(Ended):  # it may have waited too long
                return _asked(own, kind, content, seconds)
        return _asked(_Child(), kind, content, seconds)


def _asked(child: _Child, kind: bytes, content: bytes, seconds: int) -> tuple[bool, bytes]:
    """What a child says.  It is kept for the next module, unless it ends."""
    try:
        answer = child.answer(kind, content, seconds)
    except BaseException:
        child.end()
        raise
    _children[child.parent] = child
    return answer


def check_harmless(text: str) -> None:
    """`InteropError` if the parser cannot read a text without harm.

    Most texts are judged by their brackets and words.  One with affine maps, aliases, or ops of other dialects is
    first read by a child process, with all aliases written out; to start it takes about half a second.
    """
    for literal in _ESCAPED.findall(text):  # the bindings end the process for a name that is no text
        try:
            _BYTE.sub(lambda found: bytes.fromhex(found[1].decode()), literal.encode()).decode()
        except UnicodeDecodeError as error:
            raise InteropError(f"a string of the module is not UTF-8: {error}") from None
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
        by_child(b"t", content, limit)
    except Ended:
        raise InteropError(
            f"the parser of jaxlib would end this process, or take more than {limit} s, for the text: "
            "its aliases or affine maps are too deep, or a sharding does not fit its tensor"
        ) from None
