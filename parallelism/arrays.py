"""The type of a NumPy array of any dtype, as annotations write it."""

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
