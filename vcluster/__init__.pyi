from parallelism import *

from .own_names import *

HOST: int
__version__: str
