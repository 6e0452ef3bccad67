from .by_messages import ByMessages as ByMessages
from .dispatch import Collectives as Collectives
from .group import Call as Call, Group as Group, group_key as group_key
from .thresholds import INLINE_BYTES as INLINE_BYTES, PRIVATE_BYTES as PRIVATE_BYTES
from .ways import AS_MESSAGES as AS_MESSAGES, Ways as Ways
