from .answer import Answer as Answer
from .collective import check_collective as check_collective
from .formula import check_formula as check_formula
from .resharding import check_resharding as check_resharding
from .schedule import check_schedule as check_schedule
from .sharded import check_sharded as check_sharded
