from .feed_forward import NAMES as NAMES, FeedForward as FeedForward, FeedForwardPlan as FeedForwardPlan
from .policies import (
    FeedForwardSharding as FeedForwardSharding,
    FeedForwardShardingPolicy as FeedForwardShardingPolicy,
)
