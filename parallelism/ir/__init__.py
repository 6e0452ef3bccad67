"""Programs: a model in plain NumPy becomes a value that can be read, checked, differentiated, priced and run.

`record` turns a NumPy function into a `Function`; `parse` reads one from text.  `gradient` returns the function that
computes gradients.  `interpret` runs a function in this process.
"""

# These imports fill the table of operators.
from parallelism.ir.core import (
    OPERATORS,
    Builder,
    Expression,
    Extent,
    Function,
    IRError,
    Op,
    Operator,
    ParseError,
    PromotionWarning,
    RecordError,
    Rule,
    TensorType,
    Value,
    VerifyError,
    ceil_div,
    largest,
    operator,
    specialized,
    symbol,
    symbols,
    verify,
)
from parallelism.ir.operators import (  # noqa: F401
    accumulation,
    activations,
    attention,
    bits,
    cached_attention,
    collectives,
    context_attention,
    contractions,
    dispatch,
    elementwise,
    indexing,
    losses,
    normalizations,
    randomness,
    reductions,
    reshard_op as relayouts,
    scatter,
    shapes,
    vocabulary,
)
from parallelism.ir.passes import Interpreted, freed_after, gradient, interpret, live_bytes, peak_bytes
from parallelism.ir.recording import (  # noqa: F401
    numpy_calls,
    numpy_indexing,
    numpy_joins,
    numpy_products,
    numpy_reductions,
    numpy_shapes,
    record,
)
from parallelism.ir.text.parsing import parse
from parallelism.ir.tracing import apply, region

__all__ = [
    "OPERATORS",
    "Builder",
    "Expression",
    "Extent",
    "Function",
    "IRError",
    "Interpreted",
    "Op",
    "Operator",
    "ParseError",
    "PromotionWarning",
    "RecordError",
    "Rule",
    "TensorType",
    "Value",
    "VerifyError",
    "apply",
    "ceil_div",
    "freed_after",
    "gradient",
    "interpret",
    "largest",
    "live_bytes",
    "operator",
    "parse",
    "peak_bytes",
    "record",
    "region",
    "specialized",
    "symbol",
    "symbols",
    "verify",
]
