from .parts import Parts as Parts
from .training import (
    SGD as SGD,
    Adam as Adam,
    AdamW as AdamW,
    categories as categories,
    first_state as first_state,
    following as following,
    train_step as train_step,
)
