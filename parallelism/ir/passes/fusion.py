"""Fusion: chains of elementwise ops and row reductions that run as one kernel.

A value between two ops of a chain has one op that uses it, so it need not be written and read: a chain reads its inputs
and writes what other ops use, or the function returns, each once.  That is loop fusion as compilers do it (XLA's
instruction fusion; *PyTorch 2*, Ansel et al., 2024, section 5), and what handwritten kernels such as a bias with
dropout and a residual do.  An op that computes products, moves elements, reduces over other dims than the last ones, or
writes into the memory of an input, is in no chain, but for one case: what adds the result of an op to a buffer right
away (``accumulate``) is the end of that op, as in a product with BLAS's beta.
"""

from collections.abc import Callable
from dataclasses import replace

from parallelism.ir.core import Extent, Function, Op, Value

_MOVING = frozenset(("all_slice", "relayout", "reshard"))
_APART = frozenset(("einsum", "matmul")) | _MOVING
"""Operators that are in no chain, whatever their rules are."""

ELEMENTWISE = "elementwise"
"""What ``fused`` says of software whose chains have elementwise ops only: each row reduction is a kernel of its own."""

Shape = tuple[Extent, ...]


def chained(
    function: Function, mark: Callable[[Op], object] | None = None, *, rows: bool = True
) -> tuple[Function, tuple[int, ...]]:
    """The function with the ops of each chain next to each other, and the number of ops in each chain, in order.

    A chain takes the place of its last op.  An op outside of all chains is a chain of one.  The ops of a chain have
    equal ``mark``s, if that is given.  Without ``rows`` an op that needs the last dim whole, such as a softmax, is in
    no chain.
    """
    spaces = [space_of(op) if rows or _is_elementwise(op) else None for op in function.ops]
    users: dict[Value, set[int]] = {}
    for number, op in enumerate(function.ops):
        for value in op.inputs:
            users.setdefault(value, set()).add(number)
    maker = {value: number for number, op in enumerate(function.ops) for value in op.outputs}
    chain_of: dict[int, int] = {}
    """By op in a chain, the chain."""
    chains: dict[int, list[int]] = {}
    open_chains: set[int] = set()
    """Those that an op may still join: no other op has used their values."""
    for number, op in enumerate(function.ops):
        if op.kind == "accumulate" and (made := maker.get(op.inputs[1])) is not None and (
                chain_of.get(made, made) == number - 1 and len(users[op.inputs[1]]) == 1
                and op.inputs[1] not in function.outputs and _is_kernel(function.ops[made])
                and (mark is None or mark(function.ops[made]) == mark(op))):
            chains[number] = [*chains.pop(number - 1, [number - 1]), number]
            chain_of.update(dict.fromkeys(chains[number], number))
            open_chains.clear()
            continue
        if op.operator.reuses:
            open_chains.clear()         # what it writes over may be read by an op that waits for its chain
        space, joined = spaces[number], dict[int, None]()
        if space is not None:
            for value in op.inputs:
                made = maker.get(value)
                if made is None or chain_of.get(made) not in open_chains or len(users[value]) > 1 or (
                        mark is not None and mark(function.ops[made]) != mark(op)):
                    continue
                if function.ops[made].kind == "constant" or _alike(spaces[made], space):
                    joined[chain_of[made]] = None
        for value in op.inputs:
            if value in maker and (used := chain_of.get(maker[value])) is not None and used not in joined:
                open_chains.discard(used)
        if space is None:
            continue
        members = sorted(member for chain in joined for member in chains.pop(chain))
        open_chains.difference_update(joined)
        chains[number] = [*members, number]
        chain_of.update(dict.fromkeys(chains[number], number))
        open_chains.add(number)
    ordered: list[Op] = []
    lengths: list[int] = []
    for number in range(len(function.ops)):
        if (chain := chain_of.get(number, number)) == number:
            whole = chains.get(chain, [number])
            ordered += [function.ops[member] for member in whole]
            lengths.append(len(whole))
    if max(lengths, default=1) == 1:
        return function, (1,) * len(function.ops)
    return replace(function, ops=tuple(ordered)), tuple(lengths)


def space_of(op: Op) -> Shape | None:
    """The shape of the points that an op of a chain visits; None for an op that is in no chain."""
    entry = op.operator
    if entry.view or entry.reuses or entry.received is not None or entry.nbytes is not None or not op.outputs \
            or op.kind in _APART:
        return None
    rule = op.rule
    tensors = [*rule.inputs, *rule.outputs]
    if any(len(dim) > 1 for tensor in tensors for dim in tensor):
        return None
    terms = [tuple(letter for (letter,) in tensor) if all(tensor) else () for tensor in tensors]
    bare = [tuple(letter for letter in term if letter != "1") for term in terms]
    whole = max(bare, key=len, default=())
    if {*rule.letters} != {*whole} or len(whole) != len(rule.letters) or not {*whole[:-1]}.isdisjoint(rule.whole):
        return None         # it contracts, or moves elements, or needs another dim than the last one whole
    if any(_in_order(term, whole) is False for term in bare):
        return None
    if any(term != whole[:len(term)] for term in bare[len(rule.inputs):]):
        return None         # an output is reduced over dims that are not the last
    return tuple(rule.extents[letter] for letter in whole)


def _is_elementwise(op: Op) -> bool:
    """Whether each element of the results depends on one element of each input."""
    rule = op.rule
    results = [{letter for dim in tensor for letter in dim} - {"1"} for tensor in rule.outputs]
    return not rule.whole and all(result == {*rule.letters} - {"1"} for result in results)


def _is_kernel(op: Op) -> bool:
    """Whether an op computes its results, rather than to view, to write over or to communicate them."""
    entry = op.operator
    return not entry.view and not entry.reuses and entry.received is None and op.kind not in _MOVING


def _in_order(term: tuple[str, ...], whole: tuple[str, ...]) -> bool:
    """Whether the letters of a term follow each other as in the whole."""
    places = iter(whole)
    return all(letter in places for letter in term)


def _alike(made: Shape | None, used: Shape) -> bool:
    """Whether two ops visit the same rows: their points are the same, or those of one are rows of the other's."""
    if made is None:
        return False
    short, long = sorted((_without_ones(made), _without_ones(used)), key=len)
    return short == long or bool(short and long[:len(short)] == short)


def _without_ones(shape: Shape) -> Shape:
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
