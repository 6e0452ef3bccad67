from .algorithms import (
    COLLECTIVES as COLLECTIVES,
    REDUCING as REDUCING,
    ROOTED as ROOTED,
    Algorithm as Algorithm,
    Pairs as Pairs,
)
from .buffers import Message as Message, all_to_all_nbytes as all_to_all_nbytes, chunk_nbytes as chunk_nbytes
from .closed_forms import closed_form as closed_form
from .direct_traffic import Moved as Moved, Said as Said, moved_alike as moved_alike
from .explanation import Explanation as Explanation, explain as explain
from .phases import Phase as Phase, Phases as Phases
from .reductions import Reduction as Reduction
