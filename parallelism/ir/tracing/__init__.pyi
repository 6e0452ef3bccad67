from .current import recording as recording, region as region
from .memory_order import diagonal as diagonal, place_of as place_of
from .promotion import check_promotion as check_promotion, meant_dtype as meant_dtype
from .refusing import refuse as refuse, refuse_symbols as refuse_symbols
from .tracing import (
    ACCUMULATIONS as ACCUMULATIONS,
    CALLS as CALLS,
    PASSING as PASSING,
    VIEWS as VIEWS,
    Traced as Traced,
    apply as apply,
    emit as emit,
    lift as lift,
)
