from .partial import OPS as OPS, check_op as check_op, device_op as device_op
from .picture import MOST_HTML as MOST_HTML, MOST_ROWS as MOST_ROWS, Drawing as Drawing
from .tensor_sharding import DimSharding as DimSharding, TensorSharding as TensorSharding
