"""ONNX: models become programs and weights, and programs models.

`files` alone talks to the package ``onnx``, which reads and checks a file and has the bodies of composed operators.  It
gives a graph as plain values.  `reading` goes through the nodes; the other modules have what they mean.
"""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
