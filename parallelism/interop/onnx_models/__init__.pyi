from .programs import from_onnx as from_onnx
