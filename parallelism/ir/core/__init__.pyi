from .builder import Builder as Builder
from .errors import (
    IRError as IRError,
    ParseError as ParseError,
    RecordError as RecordError,
    VerifyError as VerifyError,
)
from .extents import (
    RESERVED as RESERVED,
    Expression as Expression,
    Extent as Extent,
    ceil_div as ceil_div,
    names_in as names_in,
    rounded_up as rounded_up,
)
from .function import Function as Function, Op as Op, Value as Value, frozen_attributes as frozen_attributes
from .printing import print_type as print_type
from .regions import check_path as check_path
from .rules import Dim as Dim, Rule as Rule, Shape as Shape, shape_text as shape_text
from .table import (
    OPERATORS as OPERATORS,
    Attributes as Attributes,
    Linear as Linear,
    Operator as Operator,
    Span as Span,
    checked_axis as checked_axis,
    of_a_part as of_a_part,
)
from .types import (
    DTYPE_NAMES as DTYPE_NAMES,
    DTYPES as DTYPES,
    MOST_DIMS as MOST_DIMS,
    TensorType as TensorType,
    checked_dtype as checked_dtype,
    checked_shape as checked_shape,
)
