"""A parallel kernel in ten lines: a softmax over rows whose columns are split over the devices.

Each device holds some columns of the logits, as with the split vocabulary of a tensor-parallel language model. Two
small all_reduces make the softmax exact: the largest logit of each row, then the sum of the exponentials.
"""

import numpy as np

from vcluster import Mesh, PerDevice, VirtualCluster


def softmax(device, logits):
    highest = device.all_reduce(logits.max(axis=1, initial=-np.inf), op="max")
    exponentials = np.exp(logits - highest[:, None])
    total = device.all_reduce(exponentials.sum(axis=1))
    return exponentials / total[:, None]


logits = np.random.default_rng(0).standard_normal((6, 50))
with VirtualCluster(Mesh(tp=8)) as cluster:
    run = cluster.run(softmax, PerDevice(np.array_split(logits, 8, axis=1)))

whole = np.exp(logits - logits.max(axis=1, keepdims=True))
whole /= whole.sum(axis=1, keepdims=True)
print("columns by device:", *(part.shape[1] for part in run))
print("equal to one process:", np.allclose(np.concatenate(run.outputs, axis=1), whole, rtol=1e-14, atol=0))
print("all_reduces:", run.trace.count("all_reduce"))
print("bytes received:", run.trace.bytes_received(), "in total, for logits of", logits.nbytes, "bytes")
