"""Models as programs of their loss: Transformers as people train them, a perceptron, a convolutional net, experts.

`TransformerSpec` describes a Transformer; `transformer` has the published ones by name.  The inputs of a program are
the parameters and the batch.  Extents may be symbols.  The parts of a model are regions.
"""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
