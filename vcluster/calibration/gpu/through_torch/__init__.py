"""The measurements, by PyTorch: the clock, the kernels, larger work, steps of training."""
