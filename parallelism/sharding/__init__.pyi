from .partial import OPS as OPS, check_op as check_op, device_op as device_op
from .tensor_sharding import DimSharding as DimSharding, TensorSharding as TensorSharding
