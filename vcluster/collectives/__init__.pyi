from .dispatch import Collectives as Collectives
from .group import INLINE_BYTES as INLINE_BYTES, Call as Call
from .zero_copy import PRIVATE_BYTES as PRIVATE_BYTES
