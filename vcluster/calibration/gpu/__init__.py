"""One GPU, measured through PyTorch and described as a stack of its software."""
