"""Flight-recorder dumps as they lie in files: JSON, checked against these types as it is read.

PyTorch writes a dump for each rank.  `parallelism` errors of a run of this project write all of theirs into one file
(`vcluster.tracing.failed_run`), with a few fields more.  Nothing that a file holds is executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec

MOST_BYTES = 1 << 28
"""The dump of a rank with more bytes than this is refused: 20,000 calls with 12 lines each take a sixth."""
MOST_HEAD = 1 << 12
_BY_LINES = re.compile(rb'\{"version": "[^"\n]{0,100}", "dumps": \[\n')

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Time = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
Word = Annotated[str, msgspec.Meta(max_length=1000)]
OnePath = str | PathLike[str]


class DumpError(ValueError):
    """A file is no dump that can be explained. The text names the file, what was expected and what came."""


class FileFrame(msgspec.Struct, gc=False):
    """A line of code on the stack of a call."""

    name: Word = ""
    filename: Word = ""
    line: Count = 0


class FileEntry(msgspec.Struct, gc=False):
    """A call. The last three fields are of this project's own dumps."""

    record_id: Count
    profiling_name: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
    state: Literal["scheduled", "started", "completed"]
    pg_id: Count = 0
    process_group: tuple[Word, Word] | None = None
    collective_seq_id: Count | None = None
    p2p_seq_id: Count = 0
    is_p2p: bool = False
    retired: bool = False
    input_sizes: msgspec.Raw = msgspec.Raw(b"[]")
    input_dtypes: msgspec.Raw = msgspec.Raw(b"[]")
    frames: msgspec.Raw = msgspec.Raw(b"[]")
    time_created_ns: Time | None = None
    time_discovered_started_ns: Time | None = None
    time_discovered_completed_ns: Time | None = None
    call: Annotated[str, msgspec.Meta(max_length=20_000)] = ""
    """The call as errors show it."""
    tag: Time = 0
    waited: bool = False
    """Whether the kernel waits for it."""


class GroupConfig(msgspec.Struct, gc=False):
    """A group of ranks."""

    name: Word = ""
    desc: Word = ""
    ranks: str | list[Count] = ""
    """Global ranks, in group order; as text: "[0, 1, 2]"."""


class GroupStatus(msgspec.Struct, gc=False):
    """How far a rank is in a group; -1: not known."""

    last_enqueued_collective: Time = -1
    last_completed_collective: Time = -1


class FileDump(msgspec.Struct, gc=False):
    """The dump of one rank. The last two fields are of this project's own dumps."""

    version: Word
    entries: list[FileEntry] | None = None
    rank: Count | None = None
    pg_config: dict[str, GroupConfig] = {}
    pg_status: dict[str, GroupStatus] = {}
    outcome: Literal["", "returned", "raised", "stopped"] = ""
    """How the kernel of the rank ended; "": not known."""
    raised: Word = ""
    """The type of what it raised."""


class File(FileDump, gc=False):
    """A file: one dump, or those of all ranks of a failed run."""

    dumps: list[FileDump] = []


_READER = msgspec.json.Decoder(File)


def dumps_in(paths: OnePath | Iterable[OnePath]) -> Iterator[tuple[str, int, FileDump]]:
    """The dumps in files and folders, one after the other: (file, rank, dump).  `DumpError` for what is none.

    Only one file is in memory at a time.
    """
    seen: dict[int, str] = {}
    for path in _files(paths):
        for dump in _dumps_of(path):
            rank = _rank_of(path, dump)
            if rank in seen:
                raise DumpError(f"{path} is of rank {rank}, and so is {seen[rank]}: each rank has one dump")
            seen[rank] = str(path)
            yield str(path), rank, dump
    if not seen:
        raise DumpError(f"no dump is in {_told(paths)}: give the dumps of a job, one file a rank")


def _files(paths: OnePath | Iterable[OnePath]) -> Iterator[Path]:
    for path in map(Path, [paths] if isinstance(paths, str | PathLike) else paths):
        if path.is_dir():
            found = sorted(each for each in path.iterdir() if each.is_file())
            yield from [each for each in found if each.suffix == ".json"] or found
        else:
            yield path


def _told(paths: OnePath | Iterable[OnePath]) -> str:
    return str(paths) if isinstance(paths, str | PathLike) else ", ".join(map(str, paths)) or "no file"


def _dumps_of(path: Path) -> Iterator[FileDump]:
    """The dumps in one file, one after the other if it has a line for each, as those of this project's runs."""
    with path.open("rb") as file:
        begin = file.read(MOST_HEAD)
        if begin[:1] == b"\x80":
            raise DumpError(_of_pickle(path))
        file.seek(0)
        if _BY_LINES.match(begin):
            yield from _by_lines(path, file)
        else:
            yield from _of_text(path, _at_most(path, file.read(MOST_BYTES + 1)))


def _by_lines(path: Path, file: BinaryIO) -> Iterator[FileDump]:
    """The dumps in a file that begins with ``{"version": "2.10", "dumps": [`` and has a dump in each line that follows."""
    head = file.readline(MOST_HEAD)
    line = file.readline(MOST_BYTES + 1)
    while line.strip() not in (b"]}", b""):
        text = _at_most(path, line).rstrip().removesuffix(b",")
        following = file.readline(MOST_BYTES + 1)
        yield from _of_text(path, text)
        line = following
    if line.strip() != b"]}" or file.read(1) not in (b"", b"\n"):
        raise DumpError(
            f"{path} is no flight-recorder dump as JSON: what begins with {head[:40]!r} ends with ]}} in a line"
        )


def _at_most(path: Path, text: bytes) -> bytes:
    if len(text) > MOST_BYTES:
        raise DumpError(
            f"{path} has more than {MOST_BYTES:,} bytes for one rank, which is too much to read at once: some 100,000 "
            f"calls; a smaller TORCH_FR_BUFFER_SIZE keeps fewer"
        )
    return text


def _of_text(path: Path, text: bytes) -> Iterator[FileDump]:
    try:
        file = _READER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DumpError(
            f"{path} is no flight-recorder dump as JSON: {error or 'it is nested too deep'}"
        ) from None
    dumps: list[FileDump] = [file] if file.entries is not None or not file.dumps else file.dumps
    for dump in dumps:
        if dump.entries is None:
            raise DumpError(
                f"{path} is no flight-recorder dump: it has no field `entries`, the list of calls"
            )
        if not re.fullmatch(r"2(\.\d+)*", dump.version):
            raise DumpError(f"{path} is a dump of version {dump.version!r}; 2.x can be read")
        yield dump


def _of_pickle(path: Path) -> str:
    return (
        f"{path} is a pickle, which may run code when it is read; only JSON is read here.  Where you trust it:\n"
        f"  import json, pathlib, pickle\n"
        f"  pathlib.Path({f'{path}.json'!r}).write_text(json.dumps(pickle.loads(pathlib.Path({str(path)!r}).read_bytes())))"
    )


def _rank_of(path: Path, dump: FileDump) -> int:
    if dump.rank is not None:
        return dump.rank
    number = re.search(r"(\d{1,9})(\.json)?$", path.name)
    if number is None:
        raise DumpError(
            f"{path} says no rank: a dump has a field `rank`, or its file's name ends in the rank"
        )
    return int(number[1])
