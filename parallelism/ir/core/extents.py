"""Extents may be symbolic: sums of products of integers and names, in a normal form, so equal extents compare equal.

    B, D = symbols("B D")
    2 * B * D + B       D // H       ceil_div(B, dp)       largest(4 * B, 64)

A quotient is assumed to be whole: ``D // H`` times ``H`` is ``D``, and `specialize` refuses numbers for which it is
not.  Symbols stand for extents and counts, so they are not negative; `largest` uses this to drop arguments that cannot
be the largest.  An expression without symbols is an ``int``, never an `Expression`.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from operator import index
from typing import Any, NoReturn, Union

from parallelism.display.quantities import shortened
from parallelism.ir.core.unknown_numbers import no_extent, no_number, refusing_numbers

Extent = Union[int, "Expression"]
Number = int | Fraction

SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED = re.compile(r"true|false|inf|nan|max|ceil|tensor|(ui|i|f)[0-9]+")
"""Names that have another meaning where an expression is read."""
MOST_TERMS, MOST_POWER, MOST_NUMBER = 256, 16, 2**127
BEYOND = 2**31 - 1
"""A bound of a slice as large as this lies past the end of any dim."""


@dataclass(frozen=True)
class Call:
    """``max`` of several expressions, or ``ceil`` of one (the next whole number): an atom of other expressions."""

    name: str
    arguments: tuple[Extent, ...]

    @property
    def symbols(self) -> frozenset[str]:
        return frozenset().union(*map(names_in, self.arguments))

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.arguments))})"


class OpenCall(Call):
    """An atom that says itself what it is with numbers in place of symbols."""

    def specialize(self, numbers: Mapping[str, Extent]) -> Extent:
        """It with these numbers in place of symbols."""
        raise NotImplementedError


Atom = str | Call
Monomial = tuple[tuple[Atom, int], ...]
Terms = tuple[tuple[Monomial, Number], ...]


@refusing_numbers
@dataclass(frozen=True, slots=True)
class Expression:
    """A sum of terms ``coefficient * atom**power * ...``.  Build one with `symbols` and arithmetic."""

    terms: Terms
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)
    """Once it is known: programs have few extents, which are looked up very often."""

    def __hash__(self) -> int:
        found = self._hash
        if found is None:
            found = hash(self.terms)
            object.__setattr__(self, "_hash", found)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return Expression, (self.terms,)  # names have other hashes in another process

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, int | Expression):
            return no_extent("{} + {}", self, other)
        return _sum(self.terms, _terms(other))

    __radd__ = __add__

    def __neg__(self) -> Any:
        return self * -1

    def __sub__(self, other: Any) -> Any:
        return self + other * -1 if isinstance(other, int | Expression) else no_extent("{} - {}", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self * -1 + other

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, int | Expression):
            return no_extent("{} * {}", self, other)
        return _product_of(self.terms, _terms(other))

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        return (
            _quotient(self, other)
            if isinstance(other, int | Expression)
            else no_extent("{} / {}", self, other)
        )

    def __rfloordiv__(self, other: Any) -> Any:
        return _quotient(other, self) if isinstance(other, int) else no_extent("{1} / {0}", self, other)

    __truediv__, __rtruediv__ = __floordiv__, __rfloordiv__

    def __pow__(self, exponent: Any) -> Any:
        if isinstance(exponent, int) and 0 <= exponent <= MOST_POWER:
            return math.prod((self,) * exponent)
        return no_extent("{}**{}", self, exponent, kinds=int | float | Expression)

    def __index__(self) -> NoReturn:
        no_number(self)

    __int__ = __float__ = __index__

    def __bool__(self) -> bool:
        return True

    @property
    def symbols(self) -> frozenset[str]:
        """The names of its symbols."""
        found: set[str] = set()
        for monomial, _ in self.terms:
            for atom, _ in monomial:
                found |= {atom} if isinstance(atom, str) else atom.symbols
        return frozenset(found)

    def specialize(self, **numbers: Extent) -> Extent:
        """The expression with symbols replaced by numbers or expressions.

        ``ValueError`` if the result is a number that is not whole.
        """
        if not self.symbols & numbers.keys():
            return self
        result = _with(self, numbers)
        if isinstance(result, Expression) and not result.symbols:
            given = ", ".join(f"{name}={numbers[name]}" for name in sorted(self.symbols & numbers.keys()))
            raise ValueError(f"{self} must be whole; with {given} it is {result}")
        return result

    def __str__(self) -> str:
        text = ""
        for monomial, coefficient in self.terms:
            if coefficient < 0:
                text += "-" + _text_of(monomial, -coefficient)
            else:
                text += "+" * bool(text) + _text_of(monomial, coefficient)
        return text

    __repr__ = __str__


def symbol(name: str) -> Expression:
    """A symbolic extent of this name."""
    if not isinstance(name, str) or not SYMBOL.fullmatch(name) or RESERVED.fullmatch(name):
        raise ValueError(
            f"a symbol is a name of letters, digits and _ without another meaning, got {shortened(name)}"
        )
    return Expression(((((name, 1),), 1),))


def symbols(names: str) -> tuple[Expression, ...]:
    """Symbolic extents, one for each name.  The names are separated by spaces.

    >>> B, D = symbols("B D")
    >>> (B + 1) * D - D
    B*D
    """
    return tuple(symbol(name) for name in names.split())


def ceil_div(extent: Extent, parts: Extent) -> Extent:
    """``extent / parts``, rounded up: the extent of the largest piece of ``numpy.array_split``."""
    return rounded_up(divided(extent, parts))


def rounded_up(extent: Extent) -> Extent:
    """The next whole number.  ``extent`` may be a fraction.

    What is equal is written alike: ``ceil(x + 1)`` as ``ceil(x) + 1``, and ``ceil(ceil(x) / 2)`` as ``ceil(x / 2)``.
    """
    if isinstance(extent, Expression) and not extent.symbols:
        return math.ceil(extent.terms[0][1])
    if _is_whole(extent):
        return extent
    extent = _rounded_once(extent)
    added = math.floor(constant_term(extent))
    result: Extent = atom_of(Call("ceil", (extent - added,))) + added
    return result


def _rounded_once(extent: Extent) -> Extent:
    """``x / k + n / k`` for ``ceil(x) / k + n / k``, which is the same rounded up; anything else as it is."""
    numbers = dict(_terms(extent))
    constant = Fraction(numbers.pop((), 0))
    if len(numbers) != 1:
        return extent
    ((monomial, share),) = numbers.items()
    atom, power = monomial[0]
    parts = Fraction(share).denominator
    if not isinstance(atom, Call) or atom.name != "ceil" or not len(monomial) == power == 1:
        return extent
    if share != Fraction(1, parts) or parts % constant.denominator:
        return extent
    return divided(atom.arguments[0] + int(constant * parts), parts)


def is_rounded(extent: Extent) -> bool:
    """Whether something in it is rounded up."""
    atoms = [atom for monomial, _ in _terms(extent) for atom, _ in monomial]
    return any(isinstance(atom, Call) and atom.name == "ceil" for atom in atoms)


def _is_whole(extent: Extent) -> bool:
    """Whether nothing in it is divided."""
    for monomial, coefficient in _terms(extent):
        if not isinstance(coefficient, int) or any(power <= 0 for _, power in monomial):
            return False
    return True


def divided(extent: Extent, parts: Extent) -> Extent:
    """``extent / parts``, which need not be whole.  A mere fraction is valid only inside another extent."""
    return _quotient(extent, parts, whole=False)


def constant_term(extent: Extent) -> Number:
    """The term of an extent that has no symbols: -1/2 of ``n/2 - 1/2``."""
    return dict(_terms(extent)).get((), 0)


def largest(*extents: Extent) -> Extent:
    """The largest of the extents.  Where symbols leave the order open the result is a ``max`` of the candidates."""
    kept: list[Extent] = []
    for extent in dict.fromkeys(_flattened(extents)):
        if not any(_at_least(other, extent) for other in kept):
            kept = [other for other in kept if not _at_least(extent, other)] + [extent]
    return kept[0] if len(kept) == 1 else atom_of(Call("max", tuple(sorted(kept, key=str))))


def is_negative(extent: Extent) -> bool:
    """Whether it is a number below 0; symbols are not negative."""
    return isinstance(extent, int) and extent < 0


def from_start(place: Extent, extent: Extent) -> Extent:
    """A place in a dim of ``extent``, counted from its start; a place below 0 counts from the end, as in Python.

    A place with symbols is below 0 if all of its terms are.  ``ValueError`` if its sign is open, as that of ``1 - B``.
    """
    if not isinstance(place, Expression):
        return extent + place if place < 0 else place
    degree = _order(place.terms[0][0])[0]
    if any(coefficient > 0 for monomial, coefficient in place.terms if _order(monomial)[0] == degree):
        return place
    if not _at_least(0, place):
        raise ValueError(
            f"{place} may be below 0 or not, so it is open whether it counts from the start or from the end"
        )
    counted: Extent = extent + place
    return counted


def bounds_in(extent: Extent, start: Extent | None, stop: Extent | None) -> tuple[Extent, Extent]:
    """The places ``begin, end`` that ``start:stop`` selects in a dim of ``extent``, with a step of 1 or more.

    Bounds that lie outside for all values of the symbols are moved inside, as in Python.
    """
    begin, end = (_inside(extent, bound, default) for bound, default in ((start, 0), (stop, extent)))
    return (0, 0) if _at_least(begin, end) else (begin, end)


def _inside(extent: Extent, bound: Extent | None, default: Extent) -> Extent:
    if bound is None:
        return default
    bound = bound if isinstance(bound, Expression) else index(bound)
    if isinstance(bound, int) and abs(bound) >= BEYOND:
        return extent if bound > 0 else 0
    place = from_start(bound, extent)
    if _at_least(0, place):
        return 0
    return extent if _at_least(place, extent) else place


def names_in(extent: Extent) -> frozenset[str]:
    """The symbols in an extent."""
    return extent.symbols if isinstance(extent, Expression) else frozenset()


def specialized(extent: Extent, numbers: Mapping[str, Extent]) -> Extent:
    """The extent with its symbols replaced by ``numbers``."""
    return extent.specialize(**numbers) if isinstance(extent, Expression) else extent


def product(extents: Iterable[Extent]) -> Extent:
    """The product of the extents; 1 if there are none."""
    return math.prod(extents)


def quotient(extents: Iterable[Extent], divisors: Iterable[Extent]) -> Extent | None:
    """The product of ``extents`` divided by the product of ``divisors``; None if that is not whole."""
    above, below = Counter(extents), Counter(divisors)
    try:
        return _quotient(product((above - below).elements()), product((below - above).elements()))
    except (ValueError, ZeroDivisionError):
        return None


# -- the normal form ---------------------------------------------------------------------------------------------------


def _added(terms: Iterable[tuple[Monomial, Number]]) -> dict[Monomial, Number]:
    """The terms by monomial, with the coefficients of each added up."""
    total: dict[Monomial, Number] = {}
    for monomial, coefficient in terms:
        total[monomial] = total.get(monomial, 0) + coefficient
    return total


def _times(a: Iterable[tuple[Monomial, Number]], b: Terms) -> dict[Monomial, Number]:
    return _added((_product(m, n), x * y) for m, x in a for n, y in b)


@lru_cache(maxsize=16384)
def _sum(a: Terms, b: Terms) -> Extent:
    """The sum of two extents: a program asks for few different ones, many times."""
    return _normal(_added((*a, *b)))


@lru_cache(maxsize=16384)
def _product_of(a: Terms, b: Terms) -> Extent:
    return _normal(_times(a, b))


def _normal(terms: Mapping[Monomial, Number]) -> Extent:
    kept: dict[Monomial, Number] = {}
    for monomial, coefficient in terms.items():
        if coefficient:
            kept[monomial] = int(coefficient) if coefficient.denominator == 1 else coefficient
    constant = kept.get((), 0)
    if kept.keys() <= {()} and isinstance(constant, int):
        return constant
    if len(kept) > MOST_TERMS:
        raise ValueError(f"an expression has at most {MOST_TERMS} terms, this one has {len(kept)}")
    if any(max(abs(c.numerator), c.denominator) > MOST_NUMBER for c in kept.values()):
        raise ValueError(f"a number in an expression has at most {MOST_NUMBER.bit_length()} bits")
    return Expression(tuple(sorted(kept.items(), key=lambda item: _order(item[0]))))


@lru_cache(maxsize=4096)
def _order(monomial: Monomial) -> tuple[Any, ...]:
    return -sum(power for _, power in monomial), [(str(atom), power) for atom, power in monomial]


def _terms(extent: Extent) -> Terms:
    return extent.terms if isinstance(extent, Expression) else (((), extent),)


def atom_of(atom: Atom) -> Expression:
    return Expression(((((atom, 1),), 1),))


def _product(a: Monomial, b: Monomial) -> Monomial:
    if not a or not b:
        return a or b
    powers = dict(a)
    for atom, power in b:
        powers[atom] = powers.get(atom, 0) + power
        if abs(powers[atom]) > MOST_POWER:
            raise ValueError(f"an expression has powers of at most {MOST_POWER}, got {atom}**{powers[atom]}")
    return tuple(
        sorted(((atom, power) for atom, power in powers.items() if power), key=lambda item: str(item[0]))
    )


def _quotient(extent: Extent, divisor: Extent, *, whole: bool = True) -> Extent:
    if divisor == 0:
        raise ZeroDivisionError(f"{extent} cannot be divided by 0")
    if isinstance(extent, int) and isinstance(divisor, int):
        if whole and extent % divisor:
            raise ValueError(f"{extent} is not a multiple of {divisor}")
        return _normal({(): Fraction(extent, divisor)})
    below = _terms(divisor)
    if len(below) > 1:
        above = _terms(extent)
        ratio = Fraction(above[0][1]) / below[0][1]
        if above == tuple((monomial, ratio * coefficient) for monomial, coefficient in below):
            return _normal({(): ratio})
        raise ValueError(f"{extent} cannot be divided by the sum {divisor}, only by products")
    ((monomial, coefficient),) = below
    inverse = tuple((atom, -power) for atom, power in monomial)
    return _normal({_product(a, inverse): Fraction(x) / coefficient for a, x in _terms(extent)})


def _with(extent: Extent, numbers: Mapping[str, Extent]) -> Extent:
    """The extent with symbols replaced by numbers or expressions; it may be a fraction."""
    return _normal(
        _added(
            term
            for monomial, coefficient in _terms(extent)
            for term in _substituted(monomial, coefficient, numbers)
        )
    )


def _substituted(monomial: Monomial, coefficient: Number, numbers: Mapping[str, Extent]) -> Terms:
    terms: Terms = (((), coefficient),)
    for atom, power in monomial:
        value: Extent = numbers.get(atom, atom_of(atom)) if isinstance(atom, str) else _called(atom, numbers)
        below = _terms(value)
        for _ in range(abs(power)):
            if power > 0:
                terms = tuple(_times(terms, below).items())
            elif value == 0 or len(below) > 1:
                raise ValueError(f"{_text_of(monomial, coefficient)} cannot be divided by {atom} = {value}")
            else:
                inverse = tuple((a, -p) for a, p in below[0][0])
                terms = tuple((_product(a, inverse), Fraction(x) / below[0][1]) for a, x in terms)
    return terms


def _called(call: Call, numbers: Mapping[str, Extent]) -> Extent:
    if isinstance(call, OpenCall):
        return call.specialize(numbers)
    if call.name == "max":
        return largest(*(specialized(argument, numbers) for argument in call.arguments))
    return rounded_up(_with(call.arguments[0], numbers))


def _flattened(extents: Iterable[Extent]) -> Iterator[Extent]:
    for extent in extents:
        atom = next((atom for monomial, _ in _terms(extent) for atom, _ in monomial), None)
        if isinstance(atom, Call) and atom.name == "max" and extent == atom_of(atom):
            yield from atom.arguments
        else:
            yield extent


def _at_least(a: Extent, b: Extent) -> bool:
    """Whether ``a >= b`` for all values of the symbols."""
    difference = _added((*_terms(a), *((monomial, -coefficient) for monomial, coefficient in _terms(b))))
    return all(coefficient >= 0 for coefficient in difference.values())


def _text_of(monomial: Monomial, coefficient: Number) -> str:
    above = [coefficient.numerator, *(atom for atom, power in monomial for _ in range(power))]
    below = [coefficient.denominator, *(atom for atom, power in monomial for _ in range(-power))]
    product = "*".join(str(factor) for factor in above if factor != 1) or "1"
    return "/".join([product, *(str(divisor) for divisor in below if divisor != 1)])
