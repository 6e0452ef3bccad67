"""The pieces of a training step, told once for any numbers of rows and devices: their events, prices, memory and order."""
