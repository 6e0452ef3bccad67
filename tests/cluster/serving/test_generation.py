"""Generation on devices: the tokens are those of one process without a cache, and a run is what its simulation says."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from served_models import SERVED, VOCABULARY, greedy, logits_of, parameters_of

from parallelism import Mesh, models, simulate
from parallelism.serving import Engine, EngineSettings, Request, ServedModel, run_engine
from parallelism.serving.placement import Placement, usual_strategy
from parallelism.serving.serve import on_cluster
from parallelism.serving.served_model import numbers_of
from parallelism.transforms import Strategy, TensorParallel
from vcluster import DeviceFailedError, VirtualCluster

PROMPTS = [np.random.default_rng(1).integers(0, VOCABULARY, count).tolist() for count in (5, 1, 9, 3, 2)]
NEW = 5


def expected_of(spec, prompts=PROMPTS, count=NEW):
    parameters = parameters_of(spec)
    return parameters, np.array([greedy(spec, parameters, prompt, count) for prompt in prompts])


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_one_process_generates_what_it_does_without_a_cache(name):
    parameters, expected = expected_of(SERVED[name])
    assert_array_equal(models.generate(SERVED[name], parameters, PROMPTS, NEW, page_tokens=3, chunk=5, batch=3), expected)


MESHES = [
    ("gpt2", {"tp": 2}), ("gpt2", {"pp": 3, "tp": 2}), ("llama3", {"pp": 2, "tp": 2}), ("llama3", {"tp": 6}),
    ("mixtral", {"ep": 2, "tp": 2}), ("mixtral", {"pp": 2, "ep": 4}), ("deepseek-v3", {"dp": 2, "ep": 2, "tp": 2}),
    ("deepseek-v3", {"pp": 2, "ep": 2}), ("gemma3", {"dp": 2, "tp": 3}), ("gemma3", {"pp": 2, "tp": 2}),
    ("gpt2", {"cp": 2}), ("deepseek-v3", {"pp": 2, "cp": 2, "tp": 2}),
    ("nemotron-h", {"pp": 2, "tp": 2}), ("nemotron-h", {"ep": 2, "tp": 2}), ("qwen3-next", {"dp": 2, "tp": 2}),
    ("qwen3-next", {"cp": 2}), ("falcon-h1", {"tp": 2}), ("lfm2", {"pp": 3, "tp": 2}), ("kimi-linear", {"tp": 2}),
    ("gpt-oss", {"tp": 2}), ("bloom", {"pp": 2, "dp": 2, "tp": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes"), MESHES, ids=lambda value: value if isinstance(value, str) else "-".join(value))
def test_a_cluster_generates_the_same_tokens_and_is_what_it_is_simulated_to_be(name, axes):
    spec, mesh = SERVED[name], Mesh(**axes)
    parameters, expected = expected_of(spec)
    runs = []
    with VirtualCluster(mesh, backend="thread", hardware="dgx-h100", compute="modelled") as cluster:
        found = models.generate(spec, parameters, PROMPTS, NEW, cluster, page_tokens=3, chunk=5, batch=3, runs=runs)
    assert_array_equal(found, expected)
    simulated = simulated_steps(spec, mesh, page_tokens=3, chunk=5, batch=3)
    assert len(simulated) == len(runs)
    for run, trace in zip(runs, simulated, strict=True):
        assert_same(run.trace, trace, mesh)


def simulated_steps(spec, mesh, **given):
    """The simulations of the steps of `generate`."""
    from parallelism.serving.generation import settings_for
    from parallelism.serving.placement import Placement

    placement = Placement(spec, mesh, usual_strategy(mesh))
    requests = [Request(tuple(prompt), NEW) for prompt in PROMPTS]
    settings = settings_for(placement, requests, **given)
    served, traces = ServedModel(placement, settings), []

    def run(engine, step):
        numbers = [numbers_of(placement, settings, work) for work in step]
        traces.append(simulate(served.simulated(numbers), "dgx-h100"))
        return {row.request: 0 for work in step for rows in work.rows for row in rows if row.samples}, 1.0

    run_engine(Engine(placement.spec, settings, requests), run)
    return traces


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "send", "recv")


def assert_same(trace, simulated, mesh):
    for kind in KINDS:
        assert trace.count(kind) == simulated.count(kind), kind
    for rank in range(mesh.size):
        assert trace.bytes_received(rank=rank) == simulated.bytes_received(rank=rank)
        assert trace.peak_bytes(rank) == simulated.peak_bytes(rank)
    assert trace.flops() == simulated.flops()
    assert trace.makespan_seconds == pytest.approx(simulated.makespan_seconds, rel=1e-9)


@pytest.mark.slow
def test_logits_of_steps_are_those_without_a_cache():
    spec, mesh = SERVED["deepseek-v3"], Mesh(ep=2, tp=2)
    parameters = parameters_of(spec)
    placement = Placement(spec, mesh, usual_strategy(mesh))
    settings = EngineSettings(batch=3, chunk=4, page_tokens=3, pages={"full": 20}, replicas=2)
    engine = Engine(spec, settings, [Request(tuple(prompt), 4) for prompt in PROMPTS])
    with VirtualCluster(mesh, backend="thread") as cluster:
        run = on_cluster(cluster, ServedModel(placement, settings), parameters, runs := [])

        def checked(engine, step):
            tokens, seconds = run(engine, step)
            for work, logits in zip(step, runs[-1].result, strict=True):
                for replica, rows in enumerate(work.rows):
                    for place, row in enumerate(row for row in rows if row.samples):
                        context = np.array([engine.context(row.request)])
                        assert_allclose(logits[replica, place], logits_of(spec, parameters, context)[0, -1], atol=1e-10)
            return tokens, seconds

        run_engine(engine, checked)
    assert len(engine.answers) == len(PROMPTS)


def test_devices_of_cp_share_the_tokens_of_a_prompt():
    """Keys and values of all tokens are gathered, once a layer, and of places what says where they are written."""
    spec, prompt = replace(SERVED["llama3"], tied=True), [[*range(16)]]
    steps = {}
    for axes in ({"cp": 1}, {"cp": 4}):
        with VirtualCluster(Mesh(**axes), backend="thread") as cluster:
            models.generate(spec, parameters_of(spec), prompt, 1, cluster, "cp", page_tokens=4, runs=(runs := []))
        steps[axes["cp"]] = runs[0].trace
    layers, heads, width, tokens, table = spec.layers, spec.groups, spec.head_width, 16, 4
    assert steps[4].count("all_gather") == 2 * layers + 3
    gathered = 8 * (2 * layers * heads * width + 2 + table) * tokens
    received = [steps[4].bytes_received(rank=rank) for rank in range(4)]
    reduced = 8 * spec.width  # the one token that is sampled: a sum over the devices, by ring or directly
    assert all(gathered * 3 // 4 < each <= gathered * 3 // 4 + 3 * reduced for each in received)
    head = 2 * spec.width * spec.vocabulary
    assert steps[4].flops(rank=0) - head == pytest.approx((steps[1].flops() - head) / 4, rel=0.02)


@pytest.mark.takes_seconds
def test_a_device_holds_the_bytes_of_the_cache_that_the_pages_have():
    spec, mesh = SERVED["llama3"], Mesh(tp=2)
    placement = Placement(spec, mesh, usual_strategy(mesh))
    settings = EngineSettings(batch=2, chunk=4, page_tokens=3, pages={"full": 7})
    simulated = ServedModel(placement, settings).simulated(
        [{"t": 2, "r": 2, "pages": 2, "read_full": 9, "scored_full": 9}])
    trace = simulate(simulated, "dgx-h100")
    assert trace.peak_bytes(1, "cache") == 7 * spec.cache_bytes(3, np.float64) // 2


# -- sampled -----------------------------------------------------------------------------------------------------------


def test_nothing_is_dropped_of_a_model_that_is_trained_with_dropout():
    spec = models.TransformerSpec(layers=1, width=12, heads=2, vocabulary=VOCABULARY, sequence=16, dtype=np.float64)
    parameters, expected = expected_of(spec, PROMPTS[:2], 3)
    dropping = replace(spec, hidden_dropout=0.3, attention_dropout=0.2, fused_attention=False)
    with VirtualCluster(Mesh(tp=2), backend="thread") as cluster:
        found = models.generate(dropping, parameters, PROMPTS[:2], 3, cluster=cluster)
    assert_array_equal(found, expected)


@pytest.mark.slow
def test_sampled_tokens_are_the_same_on_any_mesh():
    spec = SERVED["llama3"]
    parameters, options = parameters_of(spec), {"temperature": 0.8, "top_k": 9, "top_p": 0.95, "seed": 5}
    alone = models.generate(spec, parameters, PROMPTS, NEW, **options)
    assert (alone != models.generate(spec, parameters, PROMPTS, NEW)).any()
    for axes, more in (({"tp": 2}, {}), ({"pp": 2}, {"chunk": 3, "batch": 2}), ({"dp": 3}, {"page_tokens": 1})):
        with VirtualCluster(Mesh(**axes), backend="thread") as cluster:
            assert_array_equal(models.generate(spec, parameters, PROMPTS, NEW, cluster, **options, **more), alone)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_a_cache_of_few_bits_gives_the_same_tokens_on_a_mesh(dtype):
    spec = SERVED["deepseek-v3"]
    parameters = parameters_of(spec)
    alone = models.generate(spec, parameters, PROMPTS, NEW, cache_dtype=dtype)
    with VirtualCluster(Mesh(pp=2, ep=2), backend="thread") as cluster:
        found = models.generate(spec, parameters, PROMPTS, NEW, cluster, cache_dtype=dtype, runs=(runs := []))
    assert_array_equal(found, alone)
    kept = -(-len(PROMPTS) // 2) * spec.cache_bytes(16, dtype)  # a page of 16 tokens for each request of a replica
    assert sum(runs[0].trace.peak_bytes(rank, "cache") for rank in (0, 2)) == kept


@pytest.mark.slow
def test_stop_tokens_end_answers():
    spec = SERVED["gpt2"]
    parameters, expected = expected_of(spec)
    stop = int(expected[2, 1])
    found = models.generate(spec, parameters, PROMPTS, NEW, stop=[stop])
    for row, whole in zip(found, expected, strict=True):
        kept = [*whole].index(stop) + 1 if stop in whole else NEW
        assert row.tolist() == [*whole[:kept], *[-1] * (NEW - kept)]


@pytest.mark.slow
def test_processes_generate_what_threads_do():
    spec = replace(SERVED["llama3"], dtype="float32")
    parameters = {name: array.astype("f4") for name, array in parameters_of(spec).items()}
    with VirtualCluster(Mesh(pp=2, tp=2)) as cluster:
        found = models.generate(spec, parameters, PROMPTS, NEW, cluster, "tp pp 1f1b:2")
    assert_array_equal(found, models.generate(spec, parameters, PROMPTS, NEW))


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("axes", "given", "message"), [
    ({"tp": 2}, {"prompts": [[VOCABULARY]]}, "tokens must be in"),
    ({"tp": 2}, {"prompts": [[]]}, "must have at least one token"),
    ({"tp": 2}, {"new_tokens": 0}, "new_tokens must be an integer of at least 1, got 0"),
    ({"tp": 2}, {"pages": 1}, "need 3 pages of 3 tokens, and the cache has 1"),
    ({"tp": 2}, {"new_tokens": 40}, "do not fit the 40 positions"),
    ({"tp": 2}, {"strategy": "tp dp"}, "dp needs an axis 'dp'"),
    ({"tp": 2}, {"strategy": "zero=1"}, "inference is split by tp, dp, ep, cp and pp"),
    ({"tp": 2}, {"strategy": Strategy()}, "no transform uses the axis 'tp'"),
    ({"sp": 2}, {}, "the axes of a mesh for inference are tp, dp, ep, cp, pp, got 'sp'"),
    ({"cp": 2}, {"strategy": "ring"}, "ring: inference gathers keys and values, which is cp"),
    ({"ep": 2}, {}, "the model has no experts"),
    ({"pp": 4}, {}, "3 layers cannot be dealt to 4 stages"),
])
def test_what_is_wrong_is_told_on_the_host(axes, given, message):
    spec = SERVED["gpt2"]
    given = {"prompts": PROMPTS, "new_tokens": NEW, "page_tokens": 3} | given
    with VirtualCluster(Mesh(**axes), backend="thread") as cluster:
        with pytest.raises((ValueError, TypeError), match=message):
            models.generate(spec, parameters_of(spec), cluster=cluster, **given)
        assert cluster.run(lambda device: "serving" in device.state).outputs == [False] * cluster.size


def test_parameters_are_checked():
    spec = SERVED["gpt2"]
    parameters = parameters_of(spec)
    with pytest.raises(ValueError, match="strategy= says how a cluster runs a model; give cluster=, too"):
        models.generate(spec, parameters, PROMPTS, NEW, strategy=Strategy(TensorParallel()))
    with pytest.raises(ValueError, match=r"parameter 'norm' must be of shape \(12,\) and float64, got \(3,\) of float64"):
        models.generate(spec, parameters | {"norm": np.ones(3)}, PROMPTS, NEW)
    del parameters["0.qkv"]
    with pytest.raises(ValueError, match=r"parameters lack '0.qkv', of shape \(12, 36\)"):
        models.generate(spec, parameters, PROMPTS, NEW)


@pytest.mark.slow
def test_a_device_that_dies_in_the_middle_ends_the_generation_and_the_cluster_works_again():
    spec = SERVED["gpt2"]
    parameters, expected = expected_of(spec)
    with VirtualCluster(Mesh(tp=2)) as cluster:

        class Deadly(list):
            """Kills a device behind the third step."""

            def append(self, run):
                super().append(run)
                if len(self) == 3:
                    cluster.run(lambda device: device.rank or os.kill(os.getpid(), signal.SIGKILL))

        with pytest.raises(DeviceFailedError):
            models.generate(spec, parameters, PROMPTS, NEW, cluster, runs=Deadly())
        assert_array_equal(models.generate(spec, parameters, PROMPTS, NEW, cluster), expected)
