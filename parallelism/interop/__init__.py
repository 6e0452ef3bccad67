"""Programs from elsewhere, and back: JAX and StableHLO, ONNX, and PyTorch by way of ONNX.

Other formats are read by the libraries that define them.  These are optional: ``pip install vcluster[jax]`` and
``vcluster[onnx]``.  Each is imported in one module, when it is first needed.
"""

from parallelism.faces import load_names

__getattr__, __dir__, __all__ = load_names(__name__, __file__)
