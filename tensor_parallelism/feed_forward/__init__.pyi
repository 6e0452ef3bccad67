from .feed_forward import NAMES as NAMES, FeedForward as FeedForward, check_biases as check_biases
from .plan import FeedForwardPlan as FeedForwardPlan
from .policies import (
    FeedForwardSharding as FeedForwardSharding,
    FeedForwardShardingPolicy as FeedForwardShardingPolicy,
)
