from parallelism import *  # noqa: F403

from .own_names import *  # noqa: F403

HOST: int
__version__: str
