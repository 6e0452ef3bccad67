from .algorithm_records import CollectiveAlgorithm as CollectiveAlgorithm, Phase as Phase, Phases as Phases
from .algorithms import Algorithm as Algorithm, record_of as record_of
from .buffers import Message as Message
from .call import CollectiveCall as CollectiveCall, MemberCall as MemberCall, Traffic as Traffic
from .direct_traffic import Moved as Moved, moved_alike as moved_alike
from .explanation import Explanation as Explanation, explain as explain
from .kinds import (
    COLLECTIVES as COLLECTIVES,
    KINDS as KINDS,
    NAMED_OTHERWISE as NAMED_OTHERWISE,
    CollectiveKind as CollectiveKind,
    Pairs as Pairs,
    bus_factor as bus_factor,
    kind_of as kind_of,
    kind_of_event as kind_of_event,
)
from .reductions import Reduction as Reduction
from .registration import register_algorithm as register_algorithm, register_kind as register_kind
from .registry import RegistrationError as RegistrationError
from .results import Result as Result, copy_of as copy_of, result_of as result_of
