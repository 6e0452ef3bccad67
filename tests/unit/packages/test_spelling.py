"""Wrong names, and those of other libraries: the error says what to write here."""

import copy

import numpy as np
import pytest

import parallelism
import vcluster
from parallelism.mesh import Mesh
from parallelism.pipelining import Pipeline
from parallelism.recorder import record
from parallelism.sharding import TensorSharding
from parallelism.spelling import KEYWORDS, REMARKS, closest, did_you_mean, explains_keywords, parameters_of
from parallelism.trace import Trace
from pipeline_parallelism import MLP
from vcluster.device.other_libraries import NAMES_ELSEWHERE

MESH = Mesh(dp=2, tp=3)
TRACE = Trace([], size=2)

CALLS = [
    (lambda: TRACE.filter(axis="tp"), "trace.filter takes no axis=; did you mean axes="),
    (lambda: TRACE.filter(op="all_reduce"), "trace.filter takes no op=; did you mean name="),
    (lambda: TRACE.filter(ranks=0), r"trace.filter takes no ranks=; did you mean rank= \(a rank or several\)\?"),
    (lambda: TRACE.filter(colour=0), "trace.filter takes no colour=; it takes kind=, name=, rank=, axes="),
    (lambda: Pipeline(num_stages=4, microbatches=8), r"Pipeline takes no num_stages=; did you mean stages=\?"),
    (lambda: Pipeline(4, n_microbatches=8), r"Pipeline takes no n_microbatches=; did you mean microbatches=\?"),
    (lambda: Pipeline(4, 8, shedule="gpipe"), r"Pipeline takes no shedule=; did you mean schedule=\?"),
    (lambda: MLP((4, 4), Pipeline(1, 1), criterion="mse"), r"MLP takes no criterion=; did you mean loss=\?"),
    (lambda: TensorSharding("dp", reduce_op="sum"), r"TensorSharding takes no reduce_op=; did you mean op=\?"),
    (lambda: Mesh(2, 4), r"the axes of a mesh have names, as in Mesh\(dp=2, tp=4\); got 2, 4"),
    (lambda: MESH.group(0, ["dp"]), "axes must be one of the names 'dp', 'tp', a tuple of names, or None; got a list"),
]
ATTRIBUTES = [
    (MESH, "axis_names", r"a mesh has no 'axis_names'; did you mean mesh\.axes\?"),
    (MESH, "ndim", r"did you mean len\(mesh\.axes\)\?"),
    (MESH, "gruops", r"did you mean mesh\.groups\?"),
    (MESH, "colour", "a mesh has no 'colour'$"),
    (TRACE, "export_chrome_trace", r"did you mean trace\.to_chrome\(path\)\?"),
    (TRACE, "makespan", r"did you mean trace\.makespan_seconds\?"),
    (vcluster, "PartitionSpec", r"module 'vcluster' has no attribute 'PartitionSpec'; did you mean TensorSharding"),
    (parallelism, "DeviceMesh", r"did you mean Mesh\(dp=2, tp=4\)\?"),
    (parallelism, "TensorSharing", r"did you mean TensorSharding\?"),
    (vcluster, "colour", "module 'vcluster' has no attribute 'colour'$"),
]


@pytest.mark.parametrize(("call", "text"), CALLS)
def test_a_keyword_of_another_library_is_answered_by_the_one_here(call, text):
    with pytest.raises(TypeError, match=text):
        call()


@pytest.mark.parametrize(("of", "name", "text"), ATTRIBUTES)
def test_a_name_of_another_library_is_answered_by_the_one_here(of, name, text):
    assert not hasattr(of, name)
    with pytest.raises(AttributeError, match=text):
        getattr(of, name)


def test_a_recorded_program_gets_the_same_answers_as_a_running_one():
    for call, text in [
        (lambda device: device.all_reduce(np.ones(2), axis="tp"), "all_reduce takes no axis=; did you mean axes="),
        (lambda device: device.all_reduce(np.ones(2), dim=0), "device.all_reduce takes no dim=; it takes "),
        (lambda device: device.broadcast(np.ones(2), src=0), "device.broadcast takes no src=; did you mean root="),
        (lambda device: device.collective("all_reduce", np.ones(2), group=[[0]]), "did you mean groups="),
    ]:
        with pytest.raises(TypeError, match=text):
            record(call, MESH)


def test_a_type_error_of_the_function_itself_stays_as_it_is():
    @explains_keywords("doubled")
    def doubled(x, *, times=2):
        return x * times + None

    with pytest.raises(TypeError, match="unsupported operand"):
        doubled(2, times=3)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        doubled()
    with pytest.raises(TypeError, match=r"doubled takes no time=; did you mean times=\?"):
        doubled(2, time=3)


def test_what_is_explained_is_otherwise_the_same():
    assert Pipeline.__init__.__name__ == "__init__" and parameters_of(Pipeline)[:2] == ["stages", "microbatches"]
    assert copy.deepcopy(MESH) == MESH and copy.deepcopy(Pipeline(2, 3)) == Pipeline(2, 3)
    assert MLP((2, 3), Pipeline(1, 1)) == MLP(layer_sizes=(2, 3), pipeline=Pipeline(1, 1))


def test_the_tables_hold_names_without_case_and_underscores():
    for table in (KEYWORDS, REMARKS, NAMES_ELSEWHERE):
        assert all(name == name.lower() and "_" not in name for name in table)
    assert not set(KEYWORDS) & set(REMARKS)


def test_a_close_name_is_one_with_other_case_and_underscores():
    assert closest("Ring_Exchange", ["ring-exchange", "tree"]) == "ring-exchange"
    assert closest("x" * 10_000, ["ring"]) is None and did_you_mean("colour", ["ring"]) == ""


def test_every_name_that_is_suggested_exists_here():
    """Of what stands in the tables, the first word behind ``device.``, ``mesh.`` and so on is an attribute."""
    words = {meant.split(".")[1].partition("(")[0].partition("[")[0].partition(",")[0].split(" ")[0]
             for meant in NAMES_ELSEWHERE.values()}
    known = {*dir(vcluster.VirtualDevice), "rank", "size", "mesh", "index", "state"}
    assert words <= known
