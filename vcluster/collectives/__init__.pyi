from .dispatch import Collectives as Collectives
from .group import Call as Call
from .thresholds import INLINE_BYTES as INLINE_BYTES, PRIVATE_BYTES as PRIVATE_BYTES
