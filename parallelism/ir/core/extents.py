"""Extents that may be symbols: sums of products of integers and names, in one form, so that equal ones compare equal.

    B, D = symbols("B D")
    2 * B * D + B       D // H       ceil_div(B, dp)       largest(4 * B, 64)

A quotient is taken to be whole: ``D // H`` times ``H`` is ``D``, and `specialize` refuses numbers for which it is not.
Symbols stand for extents and counts, which are not negative; `largest` leaves out what cannot be the largest.  An
expression without symbols is an ``int``, never an `Expression`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, NoReturn, Union

Extent = Union[int, "Expression"]
Number = int | Fraction

SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED = re.compile(r"true|false|inf|nan|max|ceil|tensor|(ui|i|f)[0-9]+")
"""What means something else where an expression may stand."""
MOST_TERMS, MOST_POWER, MOST_NUMBER = 256, 16, 2**127


@dataclass(frozen=True)
class Call:
    """What no sum of products says: ``max`` of several expressions, or ``ceil`` of one, the next whole number."""

    name: str
    arguments: tuple[Extent, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.arguments))})"


Atom = str | Call
Monomial = tuple[tuple[Atom, int], ...]


@dataclass(frozen=True, slots=True)
class Expression:
    """A sum of ``coefficient * atom**power * ...``; made by `symbols` and arithmetic."""

    terms: tuple[tuple[Monomial, Number], ...]

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, int | Expression):
            return NotImplemented
        total = dict(self.terms)
        for monomial, coefficient in _terms(other):
            total[monomial] = total.get(monomial, 0) + coefficient
        return _made(total)

    __radd__ = __add__

    def __neg__(self) -> Any:
        return self * -1

    def __sub__(self, other: Any) -> Any:
        return self + other * -1 if isinstance(other, int | Expression) else NotImplemented

    def __rsub__(self, other: Any) -> Any:
        return self * -1 + other

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, int | Expression):
            return NotImplemented
        total: dict[Monomial, Number] = {}
        for a, x in self.terms:
            for b, y in _terms(other):
                product = _product(a, b)
                total[product] = total.get(product, 0) + x * y
        return _made(total)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        if not isinstance(other, int | Expression):
            return NotImplemented
        return _quotient(self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _quotient(other, self) if isinstance(other, int) else NotImplemented

    __truediv__, __rtruediv__ = __floordiv__, __rfloordiv__

    def __index__(self) -> NoReturn:
        raise TypeError(f"{self} is no number before its symbols are: specialize({self.example()})")

    __int__ = __float__ = __index__

    def __bool__(self) -> bool:
        return True

    @property
    def symbols(self) -> frozenset[str]:
        """The names in it."""
        return frozenset(_names(self))

    def example(self) -> str:
        """A call of specialize that would do, for messages."""
        return ", ".join(f"{name}=..." for name in sorted(self.symbols))

    def specialize(self, **numbers: Extent) -> Extent:
        """With these in place of the symbols; ``ValueError`` if that makes a number that is not whole."""
        if not self.symbols & numbers.keys():
            return self
        total = _Sum()
        for monomial, coefficient in self.terms:
            total.add(_substituted(monomial, coefficient, numbers))
        if len(total.terms) <= 1 and set(total.terms) <= {()}:
            number = total.terms.get((), 0)
            if number.denominator != 1:
                given = ", ".join(f"{name}={numbers[name]}" for name in sorted(self.symbols & numbers.keys()))
                raise ValueError(f"{self} must be whole; with {given} it is {number}")
            return int(number)
        return _made(total.terms)

    def __str__(self) -> str:
        text = ""
        for monomial, coefficient in self.terms:
            sign = "-" if coefficient < 0 else "+" if text else ""
            text += sign + _written(monomial, coefficient if coefficient > 0 else -coefficient)
        return text

    __repr__ = __str__


class _Sum:
    def __init__(self) -> None:
        self.terms: dict[Monomial, Number] = {}

    def add(self, terms: Iterable[tuple[Monomial, Number]]) -> None:
        for monomial, coefficient in terms:
            self.terms[monomial] = self.terms.get(monomial, 0) + coefficient


def symbol(name: str) -> Expression:
    """The extent of this name."""
    if not isinstance(name, str) or not SYMBOL.fullmatch(name) or RESERVED.fullmatch(name):
        raise ValueError(f"a symbol is a name of letters, digits and _ that means nothing else, got {name!r}")
    return Expression(((((name, 1),), 1),))


def symbols(names: str) -> tuple[Expression, ...]:
    """Several, their names separated by spaces.

    >>> B, D = symbols("B D")
    >>> (B + 1) * D - D
    B*D
    """
    return tuple(symbol(name) for name in names.split())


def ceil_div(extent: Extent, parts: Extent) -> Extent:
    """``extent / parts``, made whole upward: the largest of the pieces that ``numpy.array_split`` makes."""
    return rounded_up(divided(extent, parts))


def rounded_up(extent: Extent) -> Extent:
    """The next whole number, where ``extent`` need not be one."""
    if isinstance(extent, Expression) and not extent.symbols:
        return math.ceil(extent.terms[0][1])
    return extent if isinstance(extent, int) else _atom(Call("ceil", (extent,)))


def divided(extent: Extent, parts: Extent) -> Extent:
    """``extent / parts``, which need not be whole; of two numbers a fraction, which is an extent only inside others."""
    return _quotient(extent, parts, whole=False)


def largest(*extents: Extent) -> Extent:
    """The largest of them, as far as that can be told; of the others a ``max``."""
    kept: list[Extent] = []
    for extent in dict.fromkeys(_flattened(extents)):
        if not any(_at_least(other, extent) for other in kept):
            kept = [other for other in kept if not _at_least(extent, other)] + [extent]
    return kept[0] if len(kept) == 1 else _atom(Call("max", tuple(sorted(kept, key=str))))


def names_in(extent: Extent) -> frozenset[str]:
    """The symbols in an extent."""
    return extent.symbols if isinstance(extent, Expression) else frozenset()


def specialized(extent: Extent, numbers: Mapping[str, Extent]) -> Extent:
    """An extent with these in place of its symbols."""
    return extent.specialize(**numbers) if isinstance(extent, Expression) else extent


def product(extents: Iterable[Extent]) -> Extent:
    """Of all of them; 1 of none."""
    return math.prod(extents)


def quotient(extents: Iterable[Extent], divisors: Iterable[Extent]) -> Extent | None:
    """The product of the first through that of the others, whole; None where there is none."""
    numerator, denominator = list(extents), list(divisors)
    for divisor in list(denominator):
        if divisor in numerator:
            numerator.remove(divisor)
            denominator.remove(divisor)
    try:
        return _quotient(product(numerator), product(denominator))
    except (ValueError, ZeroDivisionError):
        return None


# -- the one form ------------------------------------------------------------------------------------------------------


def _made(terms: Mapping[Monomial, Number]) -> Extent:
    kept = {m: int(c) if c.denominator == 1 else c for m, c in terms.items() if c}
    if not kept:
        return 0
    if len(kept) > MOST_TERMS:
        raise ValueError(f"an expression has at most {MOST_TERMS} terms, this one {len(kept)}")
    if any(max(abs(c.numerator), c.denominator) > MOST_NUMBER for c in kept.values()):
        raise ValueError(f"a number in an expression has at most {MOST_NUMBER.bit_length()} bits")
    if kept.keys() == {()} and kept[()].denominator == 1:
        return int(kept[()])
    return Expression(tuple(sorted(kept.items(), key=lambda item: _order(item[0]))))


@lru_cache(maxsize=4096)
def _order(monomial: Monomial) -> tuple[Any, ...]:
    return -sum(power for _, power in monomial), [(str(atom), power) for atom, power in monomial]


def _terms(extent: Extent) -> tuple[tuple[Monomial, Number], ...]:
    return extent.terms if isinstance(extent, Expression) else (((), extent),)


def _atom(atom: Atom) -> Expression:
    return Expression(((((atom, 1),), 1),))


def _product(a: Monomial, b: Monomial) -> Monomial:
    if not a or not b:
        return a or b
    powers = dict(a)
    for atom, power in b:
        powers[atom] = powers.get(atom, 0) + power
        if abs(powers[atom]) > MOST_POWER:
            raise ValueError(f"an expression has powers up to {MOST_POWER}, not {atom}**{powers[atom]}")
    return tuple(sorted(((atom, power) for atom, power in powers.items() if power), key=lambda item: str(item[0])))


def _quotient(extent: Extent, divisor: Extent, *, whole: bool = True) -> Extent:
    if divisor == 0:
        raise ZeroDivisionError(f"{extent} through 0")
    if isinstance(extent, int) and isinstance(divisor, int):
        if whole and extent % divisor:
            raise ValueError(f"{extent} is no multiple of {divisor}")
        return _made({(): Fraction(extent, divisor)})
    below = _terms(divisor)
    if extent == divisor:
        return 1
    if len(below) > 1:
        above = _terms(extent)
        ratio = Fraction(above[0][1]) / below[0][1]
        if above == tuple((monomial, ratio * coefficient) for monomial, coefficient in below):
            return _made({(): ratio})
        raise ValueError(f"{extent} can be divided by a product, not by {divisor}")
    (monomial, coefficient), = below
    inverse = tuple((atom, -power) for atom, power in monomial)
    return _made({_product(a, inverse): Fraction(x) / coefficient for a, x in _terms(extent)})


def _substituted(
    monomial: Monomial, coefficient: Number, numbers: Mapping[str, Extent]
) -> list[tuple[Monomial, Number]]:
    terms: list[tuple[Monomial, Number]] = [((), coefficient)]
    for atom, power in monomial:
        value: Extent = numbers.get(atom, _atom(atom)) if isinstance(atom, str) else _called(atom, numbers)
        below = _terms(value)
        for _ in range(abs(power)):
            if power > 0:
                total = _Sum()
                total.add((_product(a, b), x * y) for a, x in terms for b, y in below)
                terms = list(total.terms.items())
            elif value == 0 or len(below) > 1:
                raise ValueError(f"{_written(monomial, coefficient)} cannot be divided by {atom} = {value}")
            else:
                inverse = tuple((a, -p) for a, p in below[0][0])
                terms = [(_product(a, inverse), Fraction(x) / below[0][1]) for a, x in terms]
    return terms


def _called(call: Call, numbers: Mapping[str, Extent]) -> Extent:
    if call.name == "max":
        return largest(*(specialized(argument, numbers) for argument in call.arguments))
    argument = call.arguments[0]
    total = _Sum()
    for monomial, coefficient in _terms(argument):
        total.add(_substituted(monomial, coefficient, numbers))
    terms = {monomial: c for monomial, c in total.terms.items() if c}
    if set(terms) <= {()}:
        return math.ceil(terms.get((), 0))
    return _atom(Call("ceil", (_made(terms),)))


def _flattened(extents: Iterable[Extent]) -> Iterator[Extent]:
    for extent in extents:
        terms = _terms(extent)
        monomial = terms[0][0] if terms else ()
        if len(terms) == 1 and terms[0][1] == 1 and len(monomial) == 1 and monomial[0][1] == 1:
            atom = monomial[0][0]
            if isinstance(atom, Call) and atom.name == "max":
                yield from atom.arguments
                continue
        yield extent


def _at_least(a: Extent, b: Extent) -> bool:
    """Whether ``a >= b`` whatever the symbols are."""
    rest = dict(_terms(a))
    for monomial, coefficient in _terms(b):
        if rest.pop(monomial, 0) < coefficient:
            return False
    return all(coefficient >= 0 for coefficient in rest.values())


def _names(extent: Extent) -> Iterator[str]:
    for monomial, _ in _terms(extent):
        for atom, _ in monomial:
            if isinstance(atom, str):
                yield atom
            else:
                for argument in atom.arguments:
                    yield from _names(argument)


def _written(monomial: Monomial, coefficient: Number) -> str:
    above = [str(atom) for atom, power in monomial for _ in range(power)]
    below = [str(atom) for atom, power in monomial for _ in range(-power)]
    if coefficient.numerator != 1 or not above:
        above.insert(0, str(coefficient.numerator))
    if coefficient.denominator != 1:
        below.insert(0, str(coefficient.denominator))
    return "/".join(["*".join(above), *below])
