from .communication import assert_communication as assert_communication
from .losses import Batch as Batch, Weight as Weight, check_loss as check_loss
