from .blocks import COPIED_BYTES as COPIED_BYTES, hand_over as hand_over
from .channel import ChannelStatistics as ChannelStatistics, VirtualChannel as VirtualChannel
from .encoding import (
    Encoded as Encoded,
    as_array as as_array,
    decode_alone as decode_alone,
    encode_message as encode_message,
    from_form as from_form,
    pack as pack,
    zeros_like as zeros_like,
)
from .endpoint import Endpoint as Endpoint, Owner as Owner, Pending as Pending, issue as issue
from .mailbox import Mailbox as Mailbox
from .tasks import Steps as Steps, Wait as Wait
