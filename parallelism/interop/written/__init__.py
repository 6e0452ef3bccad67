"""Programs written in other formats: StableHLO and ONNX.

JAX writes StableHLO: `stablehlo_modules` calls it for each op.  ``onnx`` writes ONNX, of the nodes of `onnx_operators`.
"""
