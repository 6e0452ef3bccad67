"""Fusion: chains of elementwise ops and row reductions that run as one kernel.

A value between two ops of a chain has one op that uses it, so it need not be written and read: a chain reads its inputs
and writes what other ops use, or the function returns, each once.  That is loop fusion as compilers do it (XLA's
instruction fusion; *PyTorch 2*, Ansel et al., 2024, section 5), and what handwritten kernels such as a bias with
dropout and a residual do.  An op that computes products, moves elements, reduces over other dims than the last ones, or
writes into the memory of an input, is in no chain, but for two cases: what adds the result of an op to a buffer right
away (``accumulate``) is the end of that op, as in a product with BLAS's beta.  And where asked for, a bias that is added
to a product right away is the end of that product, as in an epilogue of cuBLASLt.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from parallelism.ir.core import Extent, Function, Op, Value
from parallelism.ir.operators.contractions import PRODUCTS

_MOVING = frozenset(("all_slice", "relayout", "reshard"))
_APART = PRODUCTS | _MOVING
"""Operators that are in no chain, whatever their rules are."""

ELEMENTWISE = "elementwise"
"""What ``fused`` says of software whose chains have elementwise ops only: each row reduction is a kernel of its own."""
EPILOGUES = "epilogues"
"""What ``fused`` says of such software whose products add their biases, as linear layers of PyTorch do."""

Shape = tuple[Extent, ...]


def chained(
    function: Function,
    mark: Callable[[Op], object] | None = None,
    *,
    rows: bool = True,
    biases: bool = False,
) -> tuple[Function, tuple[int, ...]]:
    """The function with the ops of each chain next to each other, and the number of ops in each chain, in order.

    A chain takes the place of its last op.  An op outside of all chains is a chain of one.  The ops of a chain have
    equal ``mark``s, if that is given.  Without ``rows`` an op that needs the last dim whole, such as a softmax, is in
    no chain.  With ``biases`` a bias is added by the product before it.
    """
    chains = _Chains(function, mark, rows=rows, biases=biases)
    for number in range(len(function.ops)):
        chains.add(number)
    ordered: list[Op] = []
    lengths: list[int] = []
    for number in range(len(function.ops)):
        if chains.chain_of.get(number, number) == number:
            whole = chains.members.get(number, [number])
            ordered += [function.ops[member] for member in whole]
            lengths.append(len(whole))
    if max(lengths, default=1) == 1:
        return function, (1,) * len(function.ops)
    return replace(function, ops=tuple(ordered)), tuple(lengths)


class _Chains:
    """The chains of a function's ops, which are added in order.  A chain has the number of its last op."""

    def __init__(
        self, function: Function, mark: Callable[[Op], object] | None, *, rows: bool, biases: bool
    ) -> None:
        self.ops, self.outputs, self.mark, self.biases = function.ops, {*function.outputs}, mark, biases
        self.spaces: list[Shape | None] = []
        """By op, its `space_of`; None if it may be in no chain."""
        self.users: dict[Value, set[int]] = {}
        self.maker: dict[Value, int] = {}
        for number, op in enumerate(function.ops):
            self.spaces.append(space_of(op) if rows or _is_elementwise(op) else None)
            for value in op.inputs:
                self.users.setdefault(value, set()).add(number)
            self.maker.update(dict.fromkeys(op.outputs, number))
        self.chain_of: dict[int, int] = {}
        """By op in a chain, the chain."""
        self.members: dict[int, list[int]] = {}
        """By chain, its ops."""
        self.open: set[int] = set()
        """The chains that an op may still join: no other op has used their values."""

    def add(self, number: int) -> None:
        """Adds an op: to the chains that it joins, to a chain of its own, or to none."""
        op = self.ops[number]
        if self._ends_the_op_before(number):
            if op.operator.reuses:
                self.open.clear()
            self._close(number, self.members.pop(number - 1, [number - 1]))
            return
        if op.operator.reuses:
            self.open.clear()  # what it writes over may be read by an op that waits for its chain
        joined = self._joined(number)
        for value in op.inputs:
            used = self.chain_of.get(self.maker.get(value, -1))
            if used is not None and used not in joined:
                self.open.discard(used)
        if self.spaces[number] is None:
            return
        before = sorted(member for chain in joined for member in self.members.pop(chain))
        self.open.difference_update(joined)
        self._close(number, before)
        self.open.add(number)

    def _close(self, number: int, before: list[int]) -> None:
        """Makes a chain of the ops ``before`` an op, and of this op."""
        self.members[number] = [*before, number]
        self.chain_of.update(dict.fromkeys(self.members[number], number))

    def _ends_the_op_before(self, number: int) -> bool:
        """Whether an op adds the result of the op before it to a buffer, or a bias to it, as the end of that op."""
        op = self.ops[number]
        if op.kind == "accumulate":
            added = op.inputs[1]
        elif self.biases and op.kind == "add" and self.ops[number - 1].kind in PRODUCTS and adds_a_bias(op):
            added = op.inputs[0]
        else:
            return False
        made = self.maker.get(added)
        if made is None or self.chain_of.get(made, made) != number - 1:
            return False
        is_used_once = len(self.users[added]) == 1 and added not in self.outputs
        return is_used_once and _is_kernel(self.ops[made]) and self._is_marked_alike(made, number)

    def _joined(self, number: int) -> dict[int, None]:
        """The open chains that an op joins, in the order of its inputs."""
        found: dict[int, None] = {}
        space = self.spaces[number]
        if space is None:
            return found
        for value in self.ops[number].inputs:
            made = self.maker.get(value)
            if made is None or self.chain_of.get(made) not in self.open or len(self.users[value]) > 1:
                continue
            if not self._is_marked_alike(made, number):
                continue
            if self.ops[made].kind == "constant" or _alike(self.spaces[made], space):
                found[self.chain_of[made]] = None
        return found

    def _is_marked_alike(self, made: int, number: int) -> bool:
        return self.mark is None or self.mark(self.ops[made]) == self.mark(self.ops[number])


def space_of(op: Op) -> Shape | None:
    """The shape of the points that an op of a chain visits, without dims of extent 1; None for an op that is in no chain.

    It is empty for ops on numbers alone, and (1,) for those on tensors of one element.
    """
    entry = op.operator
    if (
        entry.view
        or entry.reuses
        or entry.received is not None
        or entry.nbytes is not None
        or entry.op_nbytes is not None
        or not op.outputs
        or op.kind in _APART
    ):
        return None
    rule = op.rule
    bare = []  # by tensor, the letters of its dims without those of extent 1
    for tensor in (*rule.inputs, *rule.outputs):
        if any(len(dim) > 1 for dim in tensor):
            return None
        bare.append(tuple(dim[0] for dim in tensor if dim != ("1",)) if all(tensor) else ())
    whole = max(bare, key=len, default=())
    if (
        {*rule.letters} != {*whole}
        or len(whole) != len(rule.letters)
        or not {*whole[:-1]}.isdisjoint(rule.whole)
    ):
        return None  # it contracts, or moves elements, or needs another dim than the last one whole
    if any(_in_order(term, whole) is False for term in bare):
        return None
    if any(term != whole[: len(term)] for term in bare[len(rule.inputs) :]):
        return None  # an output is reduced over dims that are not the last
    if not whole and any((*rule.inputs, *rule.outputs)):
        return (1,)
    return tuple(rule.extents[letter] for letter in whole)


def _is_elementwise(op: Op) -> bool:
    """Whether each element of the results depends on one element of each input."""
    rule = op.rule
    return not rule.whole and all({*chain(*tensor)} - {"1"} == {*rule.letters} for tensor in rule.outputs)


def adds_a_bias(op: Op) -> bool:
    """Whether an op adds a vector to each row of its first input."""
    rows, bias = op.rule.inputs
    return rows == op.rule.outputs[0] and [dim for dim in bias if dim != ("1",)] == [*rows[-1:]]


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
    if made is None or bool(made) != bool(used):
        return False  # a number is no row, not even of a tensor of one element
    short, long = sorted((_without_ones(made), _without_ones(used)), key=len)
    return short == long or bool(short and long[: len(short)] == short)


def _without_ones(shape: Shape) -> Shape:
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
