"""Programs: a model in plain NumPy becomes a value that can be read, checked, differentiated, priced and run.

`record` turns a NumPy function into a `Function`; `parse` reads one from text.  `gradient` returns the function that
computes gradients.  `interpret` runs a function in this process.
"""

# These imports fill the table of operators.
from parallelism.ir import (  # noqa: F401
    collectives,
    contractions,
    elementwise,
    indexing,
    losses,
    normalizations,
    numpy_calls,
    numpy_indexing,
    numpy_joins,
    numpy_products,
    numpy_shapes,
    randomness,
    reductions,
    relayouts,
    shapes,
)
from parallelism.ir.builder import Builder
from parallelism.ir.current import region
from parallelism.ir.errors import IRError, ParseError, RecordError, VerifyError
from parallelism.ir.extents import Expression, ceil_div, largest, symbol, symbols
from parallelism.ir.function import Function, Op, Value, verify
from parallelism.ir.gradients import gradient
from parallelism.ir.interpreter import Interpreted, interpret
from parallelism.ir.memory import freed_after, live_bytes, peak_bytes
from parallelism.ir.parsing import parse
from parallelism.ir.recording import record
from parallelism.ir.rules import Rule
from parallelism.ir.table import OPERATORS, Operator, operator
from parallelism.ir.tracing import apply
from parallelism.ir.types import TensorType

__all__ = [
    "OPERATORS", "Builder", "Expression", "Function", "IRError", "Interpreted", "Op", "Operator", "ParseError",
    "RecordError", "Rule", "TensorType", "Value", "VerifyError", "apply", "ceil_div", "freed_after", "gradient",
    "interpret", "largest", "live_bytes", "operator", "parse", "peak_bytes", "record", "region", "symbol", "symbols",
    "verify",
]
