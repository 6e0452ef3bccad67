"""StableHLO and JAX: modules become programs, and programs modules.

`bindings` alone talks to JAX and to MLIR's Python bindings, which come with ``jaxlib``.  It gives a module as plain
values (`module`).  `reading` goes through its ops; the other modules have what the ops mean.
"""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
