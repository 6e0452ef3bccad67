"""A ring all_reduce written by hand, with messages to the next device only.

The array is cut into one chunk per device. In the first half, each chunk travels once round the ring and collects a
term at every device. In the second half, the sums travel round and replace the terms. Each of g devices sends
2 (g - 1) chunks of 1/g of the array: less than twice the array, however many devices there are. Hence the ring is used
for large arrays.
"""

import numpy as np

from vcluster import VirtualCluster


def ring_all_reduce(device, x):
    g, me = device.size, device.rank
    chunks = np.array_split(x.copy(), g)
    for step in range(g - 1):
        device.send(chunks[(me - step) % g], (me + 1) % g)
        chunks[(me - step - 1) % g] += device.recv((me - 1) % g)
        if me == 0:
            print(f"step {step + 1}: chunk {(-step - 1) % g} of rank 0 is now {chunks[(-step - 1) % g]}")
    for step in range(g - 1):
        device.send(chunks[(me + 1 - step) % g], (me + 1) % g)
        chunks[(me - step) % g] = device.recv((me - 1) % g)
    return np.concatenate(chunks)


def kernel(device):
    x = np.arange(8.0) * 10**device.rank
    return ring_all_reduce(device, x), device.all_reduce(x, algorithm="ring")


with VirtualCluster(4) as cluster:
    run = cluster.run(kernel)

by_hand, built_in = run[0]
print("by hand: ", by_hand)
print("built in:", built_in)
print("bitwise equal on every device:", all(np.array_equal(out, by_hand) for outs in run for out in outs))
messages = run.trace.filter(kind="send")
print("by hand, bytes sent by device: ", [messages.bytes_sent(rank) for rank in range(4)])
collectives = run.trace.filter(kind="collective")
print("built in, bytes sent by device:", [collectives.bytes_sent(rank) for rank in range(4)])
