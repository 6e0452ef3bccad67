from .answer import Answer as Answer
from .collective import check_collective as check_collective
