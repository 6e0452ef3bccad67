"""What users of torch.distributed, JAX and mpi4py write in a kernel, each answered by the right call."""

import numpy as np
import pytest

from vcluster import DeviceFailedError, VirtualCluster

X = np.ones(4)
HABITS = {
    "all_reduce(axis=)": (lambda d: d.all_reduce(X, axis="tp"), "all_reduce takes no axis=; did you mean axes="),
    "all_reduce(axis_name=)": (lambda d: d.all_reduce(X, axis_name="tp"), "did you mean axes="),
    "all_reduce(group=)": (lambda d: d.all_reduce(X, group=[0, 1]), "did you mean groups= (lists of ranks) or axes="),
    "all_reduce(dim=)": (lambda d: d.all_reduce(X, dim=0), "device.all_reduce takes no dim=; it takes x=, axes=, op="),
    "all_reduce(reduce_op=)": (lambda d: d.all_reduce(X, reduce_op="sum"), "did you mean op=?"),
    "all_reduce(async_=)": (lambda d: d.all_reduce(X, async_=True), "did you mean async_op=?"),
    "all_reduce(timeout=)": (lambda d: d.all_reduce(X, timeout=3), "VirtualCluster(..., deadline_seconds=...)"),
    "all_reduce(op='SUM')": (lambda d: d.all_reduce(X, op="SUM"), "got 'SUM'; did you mean 'sum'?"),
    "all_reduce([x], x)": (lambda d: d.all_gather([X], X), "axes must be one of the names 'tp', a tuple of names, or None"),
    "all_gather(axis=)": (lambda d: d.all_gather(X, axis=0), "axes= (axes of the mesh) or dim= (a dim of the array)?"),
    "all_gather(tiled=)": (lambda d: d.all_gather(X, tiled=True), "all_scatter gives the arrays as a list"),
    "reduce_scatter(scatter_dimension=)": (lambda d: d.reduce_scatter(X, scatter_dimension=0), "did you mean dim="),
    "all_to_all(split_axis=)": (lambda d: d.all_to_all(X, split_axis=0), "did you mean split_dim=?"),
    "broadcast(src=)": (lambda d: d.broadcast(X, src=0), "did you mean root= (a position in the group)?"),
    "reduce(dst=)": (lambda d: d.reduce(X, dst=0), "did you mean root="),
    "permute(perm=)": (lambda d: d.permute(X, [], perm=[(0, 1)]), "did you mean pairs="),
    "shift(shift=)": (lambda d: d.shift(X, shift=1), "did you mean by= (places round the ring)?"),
    "send(dest=)": (lambda d: d.send(X, dest=1), "device.send takes no dest=; did you mean dst="),
    "recv(source=)": (lambda d: d.recv(source=1), "device.recv takes no source=; did you mean src="),
    "sendrecv(dest=)": (lambda d: d.sendrecv(X, dest=1, source=1), "did you mean dst="),
    "irecv(buf=)": (lambda d: d.irecv(1, buf=X), "device.irecv takes no buf="),
    "all_reduce(x, 'sum')": (lambda d: d.all_reduce(X, "sum"), "its axes are 'tp'; did you mean all_reduce(x, op='sum')?"),
    "all_reduce(x, np.maximum)": (lambda d: d.all_reduce(X, np.maximum), "did you mean all_reduce(x, op=maximum)?"),
    "all_reduce(x, [0, 1])": (lambda d: d.all_reduce(X, [0, 1]), "did you mean all_reduce(x, groups=[[0, 1], [2, 3]])?"),
    "all_reduce(x, op, axes)": (lambda d: d.all_reduce(X, "tp", "sum"), "all_reduce() got too many arguments without a name; "
                                "it is called as device.all_reduce(x, axes=None, *, op='sum', out=None, ...)"),
    "broadcast(x, 0)": (lambda d: d.broadcast(X, 0), "got an int; did you mean broadcast(x, root=0)?"),
    "reduce(x, 1)": (lambda d: d.reduce(X, 1), "did you mean reduce(x, root=1)?"),
    "all_gather(x, 0)": (lambda d: d.all_gather(X, 0), "did you mean all_gather(x, dim=0)?"),
    "all_to_all(x, axis, 0, 1)": (lambda d: d.all_to_all(X, "tp", 0, 1), "device.all_to_all(x, axes=None, *, split_dim=0, "
                                  "concat_dim=0, split_sizes=None"),
    "shift(x, 1)": (lambda d: d.shift(X, 1), "did you mean shift(x, by=1)?"),
    "permute(x, axis, pairs)": (lambda d: d.permute(X, "tp", [(0, 1)]), "pairs come before the axes: permute(x, pairs, ax"),
    "permute(x, {0: 1})": (lambda d: d.permute(X, {0: 1}), "each pair in pairs= is a list of integers, got 0; as in [(0, 1)"),
    "groups=[0, 1]": (lambda d: d.all_reduce(X, groups=[0, 1]), "a list of integers, got 0; as in groups=[[0, 1], [2, 3]]"),
    "groups=0": (lambda d: d.all_reduce(X, groups=0), "groups= is a list of groups, got 0; as in groups=[[0, 1], [2, 3]]"),
    "recv(x)": (lambda d: d.recv(X), "src is an integer, got float64[4]; the message is the result: x = recv(src)"),
    "recv(x, 0)": (lambda d: d.recv(X, 0), "device.recv() got too many arguments without a name; it is called as "
                   "device.recv(src, *, tag=0, out=None, axes=None), and returns the message"),
    "recv(x, src=0)": (lambda d: d.recv(X, src=0), "device.recv() got multiple values for argument 'src'; it is called as"),
    "send(x)": (lambda d: d.send(X), "device.send() missing 1 required positional argument: 'dst'; it is called as "
                "device.send(x, dst, *, tag=0, axes=None)"),
    "shift(texts)": (lambda d: d.shift(np.array(["a"])), "of dtype <U1; x.view(np.uint8) is an array of its bytes"),
    "all_gather(objects)": (lambda d: d.all_gather(np.array([{}])), "dtype object; all_gather_object and broadcast_object"),
    "index.tp": (lambda d: d.index.tp, "coordinates have no 'tp'; that along the axis is index['tp']"),
    "psum": (lambda d: d.psum(X, "tp"), "a device has no 'psum'; did you mean device.all_reduce?"),
    "pmean": (lambda d: d.pmean(X, "tp"), "did you mean device.all_reduce(x, op='mean')?"),
    "ppermute": (lambda d: d.ppermute(X, "tp", []), "did you mean device.permute?"),
    "psum_scatter": (lambda d: d.psum_scatter(X), "did you mean device.reduce_scatter?"),
    "axis_index": (lambda d: d.axis_index("tp"), "did you mean device.position(axis)?"),
    "Allreduce": (lambda d: d.Allreduce(X), "did you mean device.all_reduce?"),
    "bcast": (lambda d: d.bcast(X), "did you mean device.broadcast?"),
    "Get_rank": (lambda d: d.Get_rank(), "did you mean device.rank?"),
    "Barrier": (lambda d: d.Barrier(), "did you mean device.barrier?"),
    "get_world_size": (lambda d: d.get_world_size(), "did you mean device.size?"),
    "all_gather_into_tensor": (lambda d: d.all_gather_into_tensor(X, X), "did you mean device.all_gather?"),
    "mesh.get_group": (lambda d: d.mesh.get_group("tp"), "did you mean mesh.groups(axes)?"),
}


@pytest.fixture(scope="module")
def threads():
    with VirtualCluster(tp=2, backend="thread") as cluster:
        yield cluster


@pytest.mark.sampled(9)
@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_is_answered_by_the_right_call(threads, habit):
    kernel, answer = HABITS[habit]
    with pytest.raises(DeviceFailedError) as error:
        threads.run(kernel)
    text = str(error.value)
    assert answer in text and "Collectives.run" not in text and "VirtualDevice." not in text


def test_processes_answer_like_threads():
    with VirtualCluster(tp=2) as cluster:
        for habit in ("all_reduce(axis=)", "send(dest=)", "psum"):
            kernel, answer = HABITS[habit]
            with pytest.raises(DeviceFailedError) as error:
                cluster.run(kernel)
            assert answer in str(error.value)
            assert answer in str(error.value.__cause__)


def test_the_cluster_and_the_run_answer_too(threads):
    with pytest.raises(AttributeError, match=r"a cluster has no 'map'; did you mean cluster.run\(kernel, PerDevice"):
        _ = threads.map
    with pytest.raises(AttributeError, match=r"a run has no 'results'; did you mean run.outputs\?"):
        _ = threads.run(lambda device: 1).results
    assert not hasattr(threads, "_repr_markdown_")
