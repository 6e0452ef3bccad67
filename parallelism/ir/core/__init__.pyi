from .builder import Builder as Builder
from .errors import (
    IRError as IRError,
    ParseError as ParseError,
    PromotionWarning as PromotionWarning,
    RecordError as RecordError,
    SymbolError as SymbolError,
    UnequalExtents as UnequalExtents,
    VerifyError as VerifyError,
)
from .extents import (
    RESERVED as RESERVED,
    Expression as Expression,
    Extent as Extent,
    bounds_in as bounds_in,
    ceil_div as ceil_div,
    divided as divided,
    from_start as from_start,
    is_negative as is_negative,
    largest as largest,
    names_in as names_in,
    product as product,
    quotient as quotient,
    rounded_up as rounded_up,
    specialized as specialized,
    symbol as symbol,
    symbols as symbols,
)
from .function import (
    Function as Function,
    Op as Op,
    Value as Value,
    frozen_attributes as frozen_attributes,
    verify as verify,
)
from .printing import print_type as print_type
from .regions import check_path as check_path
from .rules import (
    Dim as Dim,
    Rule as Rule,
    Shape as Shape,
    along as along,
    broadcast as broadcast,
    broadcast_term as broadcast_term,
    elementwise as elementwise,
    letters as letters,
    reshape as reshape,
    rule as rule,
    shape_text as shape_text,
    terms_along as terms_along,
)
from .table import (
    OPERATORS as OPERATORS,
    Attributes as Attributes,
    Linear as Linear,
    Operator as Operator,
    Span as Span,
    along_whole as along_whole,
    checked_axis as checked_axis,
    first_dtype as first_dtype,
    meaning as meaning,
    of_a_part as of_a_part,
    operator as operator,
    register as register,
)
from .types import (
    DTYPES as DTYPES,
    MOST_DIMS as MOST_DIMS,
    TensorType as TensorType,
    checked_dtype as checked_dtype,
    checked_shape as checked_shape,
    dtype_text as dtype_text,
    resolved as resolved,
)
