"""What `run` is given: programs that would not run are refused on the host, and helpers travel with their caches."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from runtimes import KINDS

from parallelism import Operation
from parallelism.mesh import Mesh
from tensor_parallelism import MatMul
from vcluster import DeviceFailedError


@pytest.fixture(params=KINDS)
def cluster(request, cluster_of):
    return cluster_of(Mesh(devices=2), *request.param)


class Given(Operation):
    """An operation whose inputs are what it was made with."""

    def __init__(self, inputs):
        self.given = inputs

    def inputs(self, mesh):
        return self.given

    def __call__(self, device, *args):
        return len(args)


class WithoutArguments:
    pass


def yields(device):
    yield device.rank


async def awaits(device):
    return device.rank


async def awaits_and_yields(device):
    yield device.rank


class Yields(Operation):
    def __call__(self, device):
        yield device.rank


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("program", "message"), [
    (MatMul, r"run\(\) takes an Operation, got the class MatMul; make one of it, as MatMul\(\.\.\.\)$"),
    (yields, r"yields has a yield: called, it does nothing; return a list in place of the yield$"),
    (Yields(), r"__call__ has a yield: called, it does nothing"),
    (functools.partial(yields), r"yields has a yield"),
    (awaits, r"awaits is an async function: called, it does nothing; write def, and asyncio\.run\(\.\.\.\) inside it"),
    (awaits_and_yields, r"awaits_and_yields is an async function"),
    (Given(None), r"Given\.inputs must return a list with one tuple for each of the 2 devices, got None$"),
    (Given(iter("ab")), r"Given\.inputs must return a list with one tuple for each of the 2 devices, got <"),
    (Given([1, 2]), r"for each device, with its arguments; for rank 0 it has 1\. Of one argument it is \(argument,\)$"),
    (Given([(1,), "ab"]), r"for rank 1 it has 'ab'"),
], ids=lambda value: None if isinstance(value, str) else getattr(value, "__name__", type(value).__name__))
def test_a_program_that_would_not_run_is_refused(cluster, program, message):
    with pytest.raises(TypeError, match=message):
        cluster.run(program)


def test_a_function_without_python_code_fails_without_lines_of_the_library(cluster):
    messages = {len: "object of type 'VirtualDevice' has no len", WithoutArguments: "takes no arguments"}
    for program, message in messages.items():
        with pytest.raises(DeviceFailedError, match=message) as caught:
            cluster.run(program)
        assert "worker.py" not in str(caught.value)


@pytest.mark.parametrize(("result", "message"), [
    (lambda device: [device.all_reduce(1, async_op=True)],
     r"item 0 of the result cannot be sent .* \(it is an asynchronous all_reduce and not its result: write \.wait\(\)"),
    (lambda device: {"all": device},
     r"at 'all' of the result cannot be sent .* \(a device stays in its process: send what"),
], ids=["work", "device"])
def test_what_belongs_to_a_device_is_no_result(cluster, result, message):
    with pytest.raises(DeviceFailedError, match=message):
        cluster.run(result)


@functools.lru_cache(maxsize=7)
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@functools.cache
def kernel_with_a_cache(device, n):
    return fibonacci(n), fibonacci.cache_parameters(), int(device.all_reduce(1))


class Table:
    """Made by all the decorators of `functools`."""

    @functools.cached_property
    def entries(self):
        return np.arange(4)

    @functools.lru_cache   # noqa: B019
    def entry(self, n):
        return int(self.entries[n])

    @functools.singledispatchmethod
    def name(self, of):
        return "an object"

    @name.register
    def _(self, of: int):
        return f"entry {of}"


@functools.singledispatch
def name(of):
    return "an object"


@name.register
def _(of: int):
    return f"number {of}"


def test_functions_with_a_cache_travel_as_others_do(cluster):
    parameters = {"maxsize": 7, "typed": False}
    assert cluster.run(kernel_with_a_cache, 30).outputs == [(832040, parameters, 2)] * 2


def test_what_functools_makes_of_functions_and_methods_travels_with_them(cluster):
    table = Table()
    assert cluster.run(lambda device: (table.entry(3), table.entry(3), table.entries.sum())).outputs == [(3, 3, 6)] * 2
    names = "number 5", "an object", "entry 5", "an object"
    assert cluster.run(lambda device: (name(5), name("x"), table.name(5), table.name(""))).outputs == [names] * 2
