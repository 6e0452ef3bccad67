"""One lesson in a notebook: its checks, its score, and its reset.

    from lesson import Lesson
    lesson = Lesson(2)
    lesson.check("all_gather", mine)
    lesson.score()
    lesson.reset()

A folder with a notebook and this file is all that a student needs, where vcluster and Jupyter are installed.  What is
below the line holds answers: look there last.
"""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from parallelism import Mesh, Pipeline, TensorSharding, explain, models
from parallelism.algorithms import closed_form
from parallelism.planning import Plans, find_plan
from vcluster.check import (
    Answer,
    check_collective,
    check_formula,
    check_resharding,
    check_schedule,
    check_sharded,
)
from vcluster.code import ClusterError, ClusterTimeoutError
from vcluster.testing import Batch, Weight, check_loss

HERE = Path(__file__).parent
SMALL_BYTES = 9 * 2**30


class Lesson:
    """The lesson of a number, 1 to 9.

    ``backend`` is ``"thread"`` on machines with 8 GiB and less, where Python cannot share memory between processes
    (native Windows, untested), and where the environment variable ``VCLUSTER_WORKSHOP`` is ``small``; otherwise
    ``"process"``.

    The score of an exercise is that of its last check.  It is kept in a file: an exercise that passed stays done when
    the kernel or the notebook starts again, until a check of it fails or `reset` clears the score.  The file lies in
    the folder ``VCLUSTER_WORKSHOP_SCORES``, by default beside the notebooks.

    ``ValueError`` for a number that no lesson has.
    """

    def __init__(self, number: int) -> None:
        if number not in EXERCISES:
            raise ValueError(f"there is no lesson {number}; there are {', '.join(map(str, EXERCISES))}")
        self.number = number
        self.exercises = tuple(EXERCISES[number])
        """The names of the exercises, in order."""
        small = os.environ.get("VCLUSTER_WORKSHOP") == "small" or psutil.virtual_memory().total < SMALL_BYTES
        self.backend = "thread" if small or not hasattr(os, "memfd_create") else "process"
        self.last: Answer | None = None
        """The answer of the last check."""
        if done := len(self._passed()):
            print(f"lesson {number}: done before: {done} of {len(self.exercises)} exercises; lesson.score() "
                  "lists them, lesson.reset() begins anew")

    def check(self, exercise: str, mine: Callable[..., Any]) -> Answer:
        """Check a function that is the answer to an exercise, and note whether it passes.

        What the function prints in the many runs of a check, and warnings, are not shown.
        ``ValueError`` for a name that no exercise of this lesson has.
        """
        if exercise not in self.exercises:
            raise ValueError(
                f"lesson {self.number} has no exercise {exercise!r}; there are {', '.join(self.exercises)}")
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.last = EXERCISES[self.number][exercise](mine)
        passed = self._passed() - {exercise} | ({exercise} if self.last else set())
        self._file.write_text(json.dumps(sorted(passed)), encoding="utf-8")
        return self.last

    def score(self) -> None:
        """Print which exercises of this lesson passed when they were checked last."""
        passed = self._passed()
        print(f"lesson {self.number}: {len(passed)} of {len(self.exercises)} exercises (each by its last check)")
        for exercise in self.exercises:
            print(f"  {'done ' if exercise in passed else 'to do'}  {exercise}")

    def reset(self) -> None:
        """Write the notebook of this lesson anew and clear its score.  Your notebook is kept as ``....old.ipynb``.

        Then reload the page, or close the notebook and open it again, without saving it.
        """
        path = next((path for path in sorted(HERE.glob(f"{self.number}-*.ipynb"))
                     if not path.name.endswith(".old.ipynb")), None)
        if path is None:
            raise FileNotFoundError(f"there is no notebook {self.number}-*.ipynb in {HERE}")
        text = path.read_text(encoding="utf-8")
        whole = json.loads(text)
        as_given = whole["metadata"].get("vcluster", {}).get("as_given")
        if as_given is None:
            raise ValueError(f"{path.name} has lost the cells that it was given with; take the notebook anew")
        path.with_suffix(".old.ipynb").write_text(text, encoding="utf-8")
        path.write_text(json.dumps(whole | {"cells": as_given}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        self._file.unlink(missing_ok=True)
        print(f"{path.name} is as it was; reload it without saving")

    @property
    def _file(self) -> Path:
        return Path(os.environ.get("VCLUSTER_WORKSHOP_SCORES", HERE)) / f".score-{self.number}.json"

    def _passed(self) -> set[str]:
        noted = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else []
        return {exercise for exercise in self.exercises if exercise in noted}


# ------------------------------------------------------------------------------------------------------------------
# Below are the checks: what each exercise is measured by, and the usual wrong formulas.


def _formula(
    reference: Callable[..., float], cases: list[tuple[Any, ...]], mistakes: dict[str, Callable[..., float]],
    rtol: float = 1e-9,
) -> Callable[[Any], Answer]:
    return lambda mine: check_formula(mine, reference, cases, mistakes=mistakes, rtol=rtol)


def _ring_bytes(size: int, nbytes: int) -> float:
    return explain("all_reduce", algorithm="ring", inputs=[np.zeros(nbytes // 8)] * size).bytes_received[0]


def _ring_steps_seconds(size: int, nbytes: int, alpha: float, beta: float) -> float:
    steps = explain("all_reduce", algorithm="ring", inputs=[np.zeros(nbytes // 8)] * size)
    return sum(max(alpha + message.nbytes / beta for message in step.messages) for step in steps)


def _crossing(size: int, alpha: float, beta: float) -> float:
    """The bytes for which recursive doubling takes as long as the ring, by bisection."""
    low, high = 1e-9, 1e18
    for _ in range(200):
        middle = (low * high) ** 0.5
        doubling = np.log2(size) * (alpha + middle / beta)
        ring = 2 * (size - 1) * (alpha + middle / size / beta)
        low, high = (middle, high) if doubling < ring else (low, middle)
    return low


def _next_stage(rank: int, dp: int, pp: int, tp: int) -> float:
    mesh = Mesh(dp=dp, pp=pp, tp=tp)
    at = mesh.index(rank)
    return mesh.rank(dp=at["dp"], pp=at["pp"] + 1, tp=at["tp"])


def _first_row(rank: int, batch: int, dp: int, pp: int, tp: int) -> float:
    return TensorSharding("dp").slices((batch,), Mesh(dp=dp, pp=pp, tp=tp), rank)[0].start


@cache
def _least_microbatches(pp: int, bubble: float) -> float:
    return next(m for m in range(1, 1000) if Pipeline(pp, m, "1f1b").schedule.idle_fraction() <= bubble + 1e-12)


Step = Callable[[Any, dict[str, np.ndarray], list[Batch]], dict[str, Any]]


def _loss(step: Callable[[Any], Step], weights: dict[str, Weight], reference: Callable[..., Any],
          meshes: tuple[dict[str, int], ...]) -> Callable[[Any], Answer]:
    """A check of what a function adds to a training step: the loss of many devices is that of one."""
    def check(mine: Callable[..., Any]) -> Answer:
        subject = f"one loss by {getattr(mine, '__name__', 'a function')}"
        try:
            cases = check_loss(step(mine), reference, weights, meshes=meshes, deadline_seconds=DEADLINE_SECONDS)
        except AssertionError as error:
            found, _, likely = str(error).partition("\nprobably: ")
            return Answer(False, subject, found, likely=likely)
        except ClusterTimeoutError as error:
            return Answer(False, subject, "the function does not come to an end", tuple(str(error).split("\n")[1:]),
                          "a loop that never ends: what it counts does not change")
        except ClusterError as error:
            cause = error.__cause__
            told = f"it raises {type(cause).__name__}: {cause}" if cause is not None else str(error).splitlines()[0]
            return Answer(False, subject, told, error.locations[:1])
        return Answer(True, subject, f"as on one device, on all {cases} splits", cases=cases)

    return check


def _token_losses(weights: dict[str, np.ndarray], batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each token, and its gradient by the weight."""
    error = weights["w"][batch.tokens].sum(axis=-1) - batch.targets
    gradients = 2 * error[..., None, None] * (np.eye(len(weights["w"]))[batch.tokens][..., None] * np.ones(WIDTH))
    return (error**2).reshape(-1), gradients.reshape(-1, len(weights["w"]), WIDTH)


def _on_one_device(weights: dict[str, np.ndarray], batch: Batch, *, gradient: bool = False) -> dict[str, Any]:
    """The mean loss over valid tokens, and its gradient."""
    losses, gradients = _token_losses(weights, batch)
    valid = batch.valid.reshape(-1)
    loss = {"loss": losses[valid].sum() / valid.sum()}
    return loss | ({"grad.w": gradients[valid].sum(axis=0) / valid.sum()} if gradient else {})


def _mean_step(mine: Callable[..., Any]) -> Step:
    def step(device: Any, weights: dict[str, np.ndarray], microbatches: list[Batch]) -> dict[str, Any]:
        losses = [_token_losses(weights, batch)[0] for batch in microbatches]
        valid = [batch.valid.reshape(-1) for batch in microbatches]
        return {"loss": mine(device, np.concatenate(losses), np.concatenate(valid))}

    return step


def _accumulating_step(mine: Callable[..., Any]) -> Step:
    def step(device: Any, weights: dict[str, np.ndarray], microbatches: list[Batch]) -> dict[str, Any]:
        pairs = [(_token_losses(weights, batch)[0], batch.valid.reshape(-1)) for batch in microbatches]
        return {"loss": mine(device, pairs)}

    return step


def _gradient_step(mine: Callable[..., Any]) -> Step:
    def step(device: Any, weights: dict[str, np.ndarray], microbatches: list[Batch]) -> dict[str, Any]:
        pairs = [_token_losses(weights, batch) for batch in microbatches]
        valid = np.concatenate([batch.valid.reshape(-1) for batch in microbatches])
        losses, gradients = (np.concatenate(each) for each in zip(*pairs, strict=True))
        loss = device.all_reduce(losses[valid].sum(), "dp") / device.all_reduce(valid.sum(), "dp")
        return {"loss": loss, "grad.w": mine(device, gradients, valid)}

    return step


def _scaled_on_one_device(weights: dict[str, np.ndarray], batch: Batch) -> dict[str, Any]:
    """A head whose rows are scaled by the weight of a norm: the loss, and both gradients."""
    rows = weights["head"][batch.tokens]
    error = ((rows * weights["scale"]).sum(axis=-1) - batch.targets) * batch.valid
    by_row = 2 * error[..., None] / batch.valid.sum()
    head = np.zeros_like(weights["head"])
    np.add.at(head, batch.tokens, by_row * weights["scale"])
    return {"loss": (error**2).sum() / batch.valid.sum(), "grad.head": head,
            "grad.scale": (by_row * rows).sum(axis=(0, 1))}


def _norm_step(mine: Callable[..., Any]) -> Step:
    def step(device: Any, weights: dict[str, np.ndarray], microbatches: list[Batch]) -> dict[str, Any]:
        whole = weights | {"head": device.all_gather(weights["head"], "tp")}
        count = device.all_reduce(sum(batch.valid.sum() for batch in microbatches), "dp")
        terms = {"loss": 0.0, "grad.head": np.zeros_like(whole["head"]), "grad.scale": np.zeros_like(weights["scale"])}
        for batch in microbatches:
            if batch.valid.any():
                for name, value in _scaled_on_one_device(whole, batch).items():
                    terms[name] = terms[name] + value * batch.valid.sum() / count
        terms = {name: device.all_reduce(value, "dp") for name, value in terms.items()}
        pieces = np.array_split(terms["grad.head"], device.mesh.shape["tp"])
        terms["grad.head"] = pieces[device.index["tp"]]
        return terms | {"norm": mine(device, terms["grad.head"], terms["grad.scale"])}

    return step


DEADLINE_SECONDS = 8.0
WIDTH, ROWS = 2, 7
_DATA = ({"dp": 1}, {"dp": 2}, {"dp": 3})
_WEIGHT = {"w": Weight((ROWS, WIDTH))}

GPT_3 = models.TransformerSpec(layers=96, width=12288, heads=96, vocabulary=51200, sequence=2048, dtype="bfloat16")


@cache
def _plans(**settings: Any) -> Plans:
    """Plans for GPT-3 on 512 GPUs, timed as if nothing shared links."""
    chosen = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    return find_plan(GPT_3, hardware="dgx-h100:64", batch=1536, schedule="1f1b", zero=1, simulations=0, **chosen)


def _check_plan(mine: Callable[[], Any]) -> Answer:
    """A split by hand: it fits, and its step takes at most 5% longer than that of the best one with tp in a node."""
    subject = f"plan of {getattr(mine, '__name__', 'a function')}"
    try:
        given = mine()
    except Exception as error:
        likely = "" if callable(mine) else "what is checked is a function that returns the dict"
        return Answer(False, subject, f"the call raised {type(error).__name__}: {error}", likely=likely)
    names = ("tp", "pp", "microbatch")
    if not isinstance(given, dict) or sorted(given) != sorted(names) or any(
            type(number) is not int or number < 1 for number in given.values()):
        return Answer(False, subject, f"it is {given!r}, and should be a dict of three numbers from 1 on, such as "
                      "dict(tp=1, pp=1, microbatch=1)")
    best = _plans(tp=(1, 2, 4, 8), pp=(1, 2, 4, 8, 16), microbatch=(1, 2, 4))[0]
    plans, (tp, pp, microbatch) = _plans(**given), (given[name] for name in names)
    if len(plans) == 0:
        if plans.tightest is None:
            return Answer(False, subject, f"it is refused: {', '.join(plans.refused)}")
        return Answer(False, subject,
                      f"it does not fit: a device needs {plans.tightest.peak_bytes / 1e9:.0f} GB, and has 80",
                      likely=f"the parameters are split over {tp * pp} devices only" if tp * pp < 32 else
                      "the activations of so large microbatches take too much")
    seconds, count = plans[0].seconds, 1536 * tp * pp // 512 // microbatch
    figures = (("", "seconds", "memory", "bubble"), ("yours", f"{seconds:.1f}", f"{plans[0].peak_bytes / 1e9:.0f} GB",
                                                    f"{(pp - 1) / (count + pp - 1):.0%}"))
    if seconds <= 1.05 * best.seconds:
        return Answer(True, subject, "it fits, and no split with tp inside a node is more than 5% faster",
                      figures=figures)
    return Answer(False, subject, f"it fits, and a step takes {seconds:.1f} s; {best.seconds:.1f} s are possible", (),
                  "tp reaches over the links between nodes, which are slow" if tp > 8 else
                  f"the bubble: {pp} stages have {count} microbatches" if (pp - 1) / (count + pp - 1) > 0.2 else
                  "the sums of tp, in every layer, cost much: would fewer ways do, with more stages?" if tp == 8 else
                  "the products of so small microbatches are slow, or messages between so many stages", figures)


EXERCISES: dict[int, dict[str, Callable[[Any], Answer]]] = {
    1: {
        "rows": _formula(
            lambda rank, rows, size: len(np.array_split(np.arange(rows), size)[rank]),
            [(0, 8, 4), (0, 7, 3), (1, 7, 3), (2, 7, 3), (3, 2, 4)], {
                "the rows that are left over belong to nobody": lambda rank, rows, size: rows // size,
                "every device has as many as the first; not all have one of the rows that are left over":
                    lambda rank, rows, size: -(-rows // size)}),
        "rows_times": lambda mine: check_sharded(mine, "M_tp, K; K, N -> M_tp, N", np.matmul),
        "broadcast": partial(check_collective, "broadcast"),
    },
    2: {
        "all_gather": lambda mine: check_collective("all_gather", mine, algorithm="ring", hop=1, sends_wait=False),
        "all_reduce": lambda mine: check_collective("all_reduce", mine, hop=1, sends_wait=False),
        "ring_all_reduce": lambda mine: check_collective("all_reduce", mine, algorithm="ring", hop=1, sends_wait=False),
        "bytes": _formula(_ring_bytes, [(2, 480), (3, 480), (4, 480), (5, 480)], {
            "that is one half of the algorithm, and there are two halves":
                lambda size, nbytes: (size - 1) * nbytes / size,
            "whole arrays are counted; only pieces travel": lambda size, nbytes: (size - 1) * nbytes,
            "one step too many is counted in each half: there are size - 1 of them": lambda size, nbytes: 2 * nbytes,
            "one piece of each half is counted; in each half size - 1 pieces arrive":
                lambda size, nbytes: 2 * nbytes / size,
            "count the pieces: there are two halves, and in each size - 1 pieces arrive": lambda size, nbytes: nbytes,
            "whole arrays are counted, in both halves; only pieces travel":
                lambda size, nbytes: 2 * (size - 1) * nbytes}),
    },
    3: {
        "ring": partial(check_collective, "all_reduce"),
        "all_to_all": partial(check_collective, "all_to_all"),
    },
    4: {
        "ring_seconds": _formula(
            _ring_steps_seconds, [(2, 480, 1e-3, 1e3), (4, 480, 1e-6, 1e6), (5, 4000, 1e-5, 1e6)], {
                "whole arrays are sent in each step, and the ring sends pieces":
                    lambda size, nbytes, alpha, beta: 2 * (size - 1) * (alpha + nbytes / beta),
                "each step has its latency":
                    lambda size, nbytes, alpha, beta: alpha + 2 * (size - 1) * nbytes / size / beta,
                "there are two halves":
                    lambda size, nbytes, alpha, beta: (size - 1) * (alpha + nbytes / size / beta)}),
        "recursive_doubling": lambda mine: check_collective("all_reduce", mine, algorithm="recursive_doubling"),
        "crossing": _formula(
            _crossing, [(4, 1e-6, 1e9), (8, 1e-6, 1e9), (16, 2e-5, 1e10)], {
                "that is the latency alone, in bytes; how many latencies more does the ring pay, and how many bytes "
                "fewer?": lambda size, alpha, beta: alpha * beta}, 1e-6),
    },
    5: {
        "columns": lambda mine: check_sharded(mine, "M, K; K, N_tp -> M, N_tp", np.matmul),
        "inner": lambda mine: check_sharded(mine, "M, K_tp; K_tp, N -> M, N", np.matmul),
        "feed_forward": lambda mine: check_sharded(
            mine, "M, K; K, N_tp; N_tp, L -> M, L", lambda x, w1, w2: np.maximum(x @ w1, 0) @ w2),
        "to_columns": lambda mine: check_resharding(mine, "[tp, None]", "[None, tp]", cheapest=True),
    },
    6: {
        "bubble": _formula(
            lambda p, m: Pipeline(p, m, "gpipe").schedule.idle_fraction(), [(1, 1), (2, 3), (4, 8), (4, 4), (8, 3)], {
                "the idle cycles are compared with the busy ones, in place of all": lambda p, m: (p - 1) / m,
                "off by one: a rank waits for the other stages only": lambda p, m: p / (m + p),
                "a rank waits p - 1 cycles with forwards and p - 1 with backwards, where p is the number of stages":
                    lambda p, m: (p - 1) / (2 * m + p - 1),
                "the idle cycles are counted twice, and the busy ones once": lambda p, m: 2 * (p - 1) / (m + p - 1),
                "off by one below the line: how many cycles are there in a row?": lambda p, m: (p - 1) / (m + p),
                "that is the number of idle cycles of a rank: divide it by all its cycles": lambda p, m: 2 * (p - 1),
                "that is the number of idle cycles of all ranks: divide it by all cycles":
                    lambda p, m: 2 * p * (p - 1),
                "that is in percent, and a fraction is wanted": lambda p, m: 100 * (p - 1) / (m + p - 1),
                "that is the busy part; the bubble is the rest": lambda p, m: m / (m + p - 1)}),
        "gpipe": lambda mine: check_schedule(mine, stages=4, microbatches=8, like="gpipe"),
        "one_f_one_b": lambda mine: check_schedule(mine, stages=4, microbatches=8, like="1f1b"),
        "memory": _formula(
            lambda rank, p, m: Pipeline(p, m, "1f1b").schedule.peak_live()[rank],
            [(0, 4, 8), (1, 4, 8), (3, 4, 8), (0, 4, 2), (0, 8, 64)], {
                "that is GPipe; with 1F1B the number of microbatches does not matter, if there are enough":
                    lambda rank, p, m: m,
                "off by one: the stage itself counts": lambda rank, p, m: min(p - rank - 1, m),
                "there may be fewer microbatches than stages": lambda rank, p, m: p - rank,
                "that is as many on each rank; the nearer to the last stage, the fewer": lambda rank, p, m: min(p, m),
                "that is as many on each rank; the nearer to the last stage, the fewer, and there may be fewer "
                "microbatches than stages": lambda rank, p, m: p,
                "it falls with the rank: the last stage keeps one": lambda rank, p, m: min(rank + 1, m),
                "it falls with the rank, and the last stage keeps one": lambda rank, p, m: rank + 1,
                "off by one: the last stage keeps one": lambda rank, p, m: min(p - rank + 1, m),
                "off by one: the last stage keeps one, and there may be fewer microbatches than stages":
                    lambda rank, p, m: p - rank + 1,
                "off by one: the stage itself counts, and there may be fewer microbatches than stages":
                    lambda rank, p, m: p - rank - 1}),
    },
    7: {
        "rank": _formula(
            lambda a, b, c, dp, pp, tp: Mesh(dp=dp, pp=pp, tp=tp).rank(dp=a, pp=b, tp=c),
            [(1, 0, 1, 2, 2, 2), (1, 2, 3, 2, 3, 4), (0, 1, 0, 3, 2, 5)], {
                "the first axis is counted fastest, and it should be the last":
                    lambda a, b, c, dp, pp, tp: a + dp * (b + pp * c)}),
        "next_stage": _formula(
            _next_stage, [(0, 1, 2, 2), (1, 2, 3, 4), (17, 2, 3, 4), (1, 3, 2, 2)], {
                "that is the next device of the same stage: tp is counted fastest": lambda rank, dp, pp, tp: rank + 1,
                "that is the same stage of the next replica": lambda rank, dp, pp, tp: rank + pp * tp,
                "the axis before the last one has as many stages as pp, but a step along it passes all of tp":
                    lambda rank, dp, pp, tp: rank + pp}),
        "first_row": _formula(
            _first_row, [(5, 8, 2, 2, 2), (3, 8, 2, 2, 2), (17, 12, 3, 2, 4), (8, 12, 3, 2, 4)], {
                "all devices of a replica work on the same rows":
                    lambda rank, batch, dp, pp, tp: rank * batch // (dp * pp * tp),
                "dp is the first axis, and the first axis is counted slowest":
                    lambda rank, batch, dp, pp, tp: rank % dp * (batch // dp),
                "that is the number of the replica, not of its first row":
                    lambda rank, batch, dp, pp, tp: rank // (pp * tp)}),
        "parameters": _formula(
            lambda n, dp, pp, tp: sum(n / pp / tp for _ in Mesh(dp=dp, pp=pp, tp=tp)) / (dp * pp * tp),
            [(64, 1, 2, 2), (96, 2, 2, 2), (960, 4, 8, 2)], {
                "replicas do not share parameters: each has all of them": lambda n, dp, pp, tp: n / (dp * pp * tp)}),
        "gradient": lambda mine: check_sharded(
            mine, "B_dp, K; B_dp, N -> K, N", lambda x, dy: x.T @ dy,
            meshes=[{"dp": dp, "tp": tp} for dp, tp in ((1, 1), (2, 1), (3, 1), (4, 1), (2, 3), (3, 2))]),
        "gradient_bytes": _formula(
            lambda n, width, dp, pp, tp: closed_form("all_reduce", "ring", dp).bytes_received(n * width / pp / tp)[0],
            [(960, 4, 2, 2, 2), (960, 2, 4, 1, 2), (4800, 4, 8, 2, 1), (4800, 4, 1, 2, 2)], {
                "a device has only its part of the parameters":
                    lambda n, width, dp, pp, tp: 2 * (dp - 1) / dp * n * width,
                "there are two halves": lambda n, width, dp, pp, tp: (dp - 1) / dp * n / (pp * tp) * width,
                "gradients have a width, in bytes": lambda n, width, dp, pp, tp: 2 * (dp - 1) / dp * n / (pp * tp),
                "the ring is that of the replicas, and not that of all devices":
                    lambda n, width, dp, pp, tp: 2 * (1 - 1 / (dp * pp * tp)) * n / (pp * tp) * width}),
    },
    8: {
        "seconds": _formula(
            lambda flops, devices, rate, part: flops / devices / rate / part,
            [(3.4e18, 512, 989e12, 0.5), (1e15, 1, 1e12, 0.25)], {
                "a lower utilization makes it slower, not faster":
                    lambda flops, n, rate, part: flops * part / (n * rate),
                "the devices work at the same time": lambda flops, n, rate, part: flops / (rate * part)}),
        "state": _formula(
            lambda n, dp, pp, tp: (2 + 2) * n / pp / tp + 12 * n / Mesh(dp=dp, pp=pp, tp=tp).size,
            [(175e9, 8, 8, 8), (1e9, 1, 1, 1), (13e9, 4, 1, 2)], {
                "nothing is split over dp here; with ZeRO the optimizer's state is":
                    lambda n, dp, pp, tp: 16 * n / (pp * tp),
                "ZeRO of stage 1 splits the optimizer's state over dp, and neither weights nor gradients":
                    lambda n, dp, pp, tp: 16 * n / (dp * pp * tp),
                "the gradients are missing": lambda n, dp, pp, tp: (2 + 12 / dp) * n / (pp * tp),
                "every device has a part of the layers only: pp and tp are missing":
                    lambda n, dp, pp, tp: (4 + 12 / dp) * n}),
        "microbatches": _formula(
            lambda batch, dp, microbatch: len(range(0, batch, dp * microbatch)),
            [(1536, 8, 1), (1536, 16, 2), (64, 1, 4)], {
                "each replica has only its part of the batch": lambda batch, dp, microbatch: batch // microbatch,
                "that is the number of sequences of a replica: they go in microbatches":
                    lambda batch, dp, microbatch: batch // dp}),
        "enough": _formula(
            _least_microbatches, [(8, 0.3), (4, 0.25), (2, 0.3), (5, 0.2)], {
                "rounded down: with one microbatch fewer the bubble is larger than allowed":
                    lambda pp, bubble: (pp - 1) * (1 - bubble) // bubble,
                "the bubble is compared with the busy time; it is a part of all the time":
                    lambda pp, bubble: -(-(pp - 1) // bubble),
                "all stages are counted: a rank waits for the others":
                    lambda pp, bubble: -(-pp * (1 - bubble) // bubble)}),
        "plan": _check_plan,
    },
    9: {
        "mean_loss": _loss(_mean_step, _WEIGHT, _on_one_device, _DATA),
        "accumulated_loss": _loss(_accumulating_step, _WEIGHT, _on_one_device, _DATA),
        "mean_gradient": _loss(_gradient_step, _WEIGHT, partial(_on_one_device, gradient=True), _DATA),
        "global_norm": _loss(
            _norm_step, {"head": Weight((ROWS, WIDTH), "[tp, None]"), "scale": Weight((WIDTH,))}, _scaled_on_one_device,
            ({"dp": 1}, {"tp": 2}, {"dp": 2, "tp": 3})),
    },
}
"""By lesson and exercise, its check."""
