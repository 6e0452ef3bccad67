from .call import Call as Call
from .dispatch import Collectives as Collectives
from .group import INLINE_BYTES as INLINE_BYTES
from .zero_copy import PRIVATE_BYTES as PRIVATE_BYTES
