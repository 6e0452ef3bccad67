from .op_sharding import WAITS as WAITS, OpSharding as OpSharding, op_shardings as op_shardings
from .prices import Connection as Connection, connect as connect
