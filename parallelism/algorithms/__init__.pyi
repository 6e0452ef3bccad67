from .algorithms import (
    ALGORITHMS as ALGORITHMS,
    Algorithm as Algorithm,
    Transfer as Transfer,
    record_of as record_of,
)
from .chunks import ChunkOf as ChunkOf
from .closed_forms import closed_form as closed_form
from .deduplicated import Deduplicated as Deduplicated, runs_directly as runs_directly
from .direct import direct_of as direct_of
from .kinds import (
    ARRAYS as ARRAYS,
    BLOCKS as BLOCKS,
    BLOCKS_OF_ALL as BLOCKS_OF_ALL,
    COLLECTIVES as COLLECTIVES,
    KINDS as KINDS,
    NAMED_OTHERWISE as NAMED_OTHERWISE,
    PIECES as PIECES,
    CollectiveKind as CollectiveKind,
    Pairs as Pairs,
    bus_factor as bus_factor,
    check_kind as check_kind,
    kind_of as kind_of,
    kind_of_event as kind_of_event,
)
from .patterns import Listed as Listed, Pairwise as Pairwise, Phase as Phase
from .records import (
    HIERARCHICAL as HIERARCHICAL,
    MPI as MPI,
    TORUS as TORUS,
    ClosedForm as ClosedForm,
    CollectiveAlgorithm as CollectiveAlgorithm,
    Cost as Cost,
    Phases as Phases,
)
from .registry import RegistrationError as RegistrationError
