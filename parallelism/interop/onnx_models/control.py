"""What branches, loops and sequences mean: branches of a known condition, and loops with a fixed number of turns.

A sequence is a list of arrays; none is a value of the program.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from parallelism.interop.folding import emit, known, same_everywhere, whole
from parallelism.interop.moving_elements import concatenated, flipped, part, reshaped
from parallelism.interop.onnx_models.elementwise import ew
from parallelism.interop.onnx_models.graph import Graph, GraphNode
from parallelism.interop.onnx_models.reading import Reader, meaning, with_optional
from parallelism.interop.onnx_models.shapes import axis_of

MOST_TURNS = 10_000


def _run(reader: Reader, node: GraphNode, name: str, given: list[Any]) -> list[Any]:
    """What the graph of an attribute returns."""
    graph = node.get(name)
    if not isinstance(graph, Graph):
        raise node.wrong(f"it has no graph {name}")
    inner = dict(zip([value.name for value in graph.inputs], given, strict=False))
    return reader.graph(graph, {**reader.around, **inner})


@meaning("If")
def _if(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """Both branches, if the condition is not known: elements of one are selected."""
    holds = same_everywhere(x[0])
    if holds is not None:
        return _run(reader, node, "then_branch" if holds else "else_branch", [])
    then, otherwise = (_run(reader, node, name, []) for name in ("then_branch", "else_branch"))
    if any(a.shape != b.shape for a, b in zip(then, otherwise, strict=True)):
        raise node.unsupported("the branches give different shapes, and the condition is not known")
    return [ew("where", reshaped(x[0], ()), a, b) for a, b in zip(then, otherwise, strict=True)]


@meaning("Loop")
def _loop(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    x = with_optional(x, 2)
    count = MOST_TURNS + 1 if x[0] is None else int(reader.ints(node, x[0], "the number of turns")[0])
    goes_on, state = x[1], list(x[2:])
    scans: list[list[Any]] | None = None
    for turn in range(min(count, MOST_TURNS + 1)):
        if goes_on is not None:
            flag = known(goes_on)
            if flag is None:
                raise node.unsupported(
                    "the number of turns depends on the inputs; only loops with a fixed one are supported"
                )
            if not flag.all():
                break
        if turn == MOST_TURNS:
            raise node.unsupported(f"the loop has more than {MOST_TURNS} turns")
        flag_given = np.asarray(True) if goes_on is None else goes_on
        goes_on, *results = _run(reader, node, "body", [np.asarray(turn), flag_given, *state])
        state, made = results[: len(state)], results[len(state) :]
        scans = [[] for _ in made] if scans is None else scans
        for own, value in zip(scans, made, strict=True):
            own.append(value)
    if scans is None and len(node.outputs) > len(state):
        raise node.unsupported("a loop without turns has no results to put together")
    return [*state, *(_stacked(parts, 0) for parts in scans or [])]


def _stacked(parts: list[Any], axis: int) -> Any:
    wide = [whole(reshaped(each, (*each.shape[:axis], 1, *each.shape[axis:]))) for each in parts]
    return emit("concatenate", *wide, axis=axis) if len(wide) > 1 else wide[0]


@meaning("Scan")
def _scan(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    count = node.get("num_scan_inputs")
    state = list(x[: len(x) - count])
    sequences = x[len(x) - count :]
    axes = list(node.get("scan_input_axes", (0,) * count))
    backwards = node.get("scan_input_directions", (0,) * count)
    for i, sequence in enumerate(sequences):
        axes[i] %= len(sequence.shape)
        if backwards[i]:
            sequences[i] = flipped(sequence, axes[i])
    made: list[list[Any]] = []
    for turn in range(sequences[0].shape[axes[0]]):
        parts = [_of_turn(*own, turn) for own in zip(sequences, axes, strict=True)]
        results = _run(reader, node, "body", [*state, *parts])
        state = results[: len(state)]
        made = made or [[] for _ in results[len(state) :]]
        for own, value in zip(made, results[len(state) :], strict=True):
            own.append(value)
    joins = node.get("scan_output_axes", (0,) * len(made))
    backwards = node.get("scan_output_directions", (0,) * len(made))
    for own, axis, turned in zip(made, joins, backwards, strict=True):
        if turned:
            own.reverse()
        state.append(_stacked(own, axis % (len(own[0].shape) + 1)))
    return state


def _of_turn(sequence: Any, axis: int, turn: int) -> Any:
    """What a turn reads of a sequence along a dim."""
    rest = [n for d, n in enumerate(sequence.shape) if d != axis]
    return reshaped(part(sequence, axis, turn, turn + 1), rest)


# -- sequences ---------------------------------------------------------------------------------------------------------


@meaning("SplitToSequence")
def _split_to_sequence(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    axis = axis_of(node, len(x[0].shape))
    extent = x[0].shape[axis]
    _, split = with_optional(x, 2)
    given = None if split is None else reader.numbers(node, split, "split")
    if given is None or not given.ndim:
        if not isinstance(extent, int):
            raise node.unsupported(f"the extent of dim {axis}, {extent}, must be a number")
        size = 1 if given is None else int(given)
        sizes = [min(size, extent - begin) for begin in range(0, extent, size)]
    else:
        sizes = given.tolist()
    ends = np.cumsum([0, *sizes]).tolist()
    parts = [part(x[0], axis, begin, end) for begin, end in pairwise(ends)]
    if given is None and not node.get("keepdims", 1):
        rest = [n for d, n in enumerate(x[0].shape) if d != axis]
        parts = [reshaped(each, rest) for each in parts]
    return [parts]


@meaning("SequenceConstruct", "SequenceEmpty")
def _sequence(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return [list(x)]


@meaning("SequenceAt")
def _at(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return x[0][int(reader.numbers(node, x[1], "the position").reshape(()))]


@meaning("SequenceLength")
def _length(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return np.asarray(len(x[0]), np.int64)


@meaning("SequenceInsert", "SequenceErase")
def _changed(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    found = list(x[0])
    at = 1 if node.kind == "SequenceErase" else 2
    last = len(found) - (node.kind == "SequenceErase")
    place = int(reader.numbers(node, x[at], "the position").reshape(())) if len(x) > at else last
    if node.kind == "SequenceInsert":
        found.insert(place, x[1])
    else:
        del found[place]
    return [found]


@meaning("ConcatFromSequence")
def _joined(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    axis, parts = node.get("axis", 0), x[0]
    if node.get("new_axis", 0):
        return _stacked(parts, axis % (len(parts[0].shape) + 1))
    return concatenated(parts, axis % len(parts[0].shape))
