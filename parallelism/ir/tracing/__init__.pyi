from .current import recording as recording, region as region
from .refusing import refuse as refuse, refuse_symbols as refuse_symbols
from .tracing import (
    CALLS as CALLS,
    VIEWS as VIEWS,
    Traced as Traced,
    apply as apply,
    check_promotion as check_promotion,
    emit as emit,
    lift as lift,
)
