from .caches import (
    CacheArray as CacheArray,
    cache_arrays as cache_arrays,
    cache_bytes as cache_bytes,
    columns_of as columns_of,
)
from .programs import Part as Part, decode as decode, engine_step as engine_step, prefill as prefill
