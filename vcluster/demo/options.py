"""The command line of each demo: its axes and options, with their help and examples."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import Any

from parallelism.display import WIDTH
from vcluster.cli.command_line import Arguments, Parser, choice, mesh_arguments, positive, whole, wholes
from vcluster.mpi import BACKENDS, usual_backend

PROGRAM = "python -m vcluster.demo"


def _parser(
    name: str,
    description: str,
    examples: str,
    options: Arguments,
    axes: Mapping[str, str] | None = None,
    before: str = "",
    after: str = "",
) -> Parser:
    """The parser of the demo with this name.

    ``examples`` of ``--help``: arguments of the demo, and explanations indented below them. ``axes``: the help of each
    axis that has a flag; without any, there is no ``--mesh`` either. ``before`` and ``after``: lists around the
    examples, each with a title.
    """
    calls = []
    for line in examples.splitlines():
        is_continued = line.startswith("   ")
        calls.append(line if is_continued else f"  {PROGRAM} {name} {line}")
    epilog = "\n\n".join(filter(None, (before, "\n".join(["examples:", *calls]), after)))
    mesh = mesh_arguments(**axes) if axes else {}
    arguments = {**mesh, **options, **_PAGE, **_BACKEND}
    return Parser(arguments, prog=f"{PROGRAM} {name}", description=description, epilog=epilog)


def _count(
    help: str, default: int | None = None, *, least: int = 1, most: int | None = None
) -> dict[str, Any]:
    return {"type": whole(least, most), "default": default, "metavar": "N", "help": help}


def _extents(metavar: str, default: tuple[int, ...] | None, help: str) -> dict[str, Any]:
    return {"type": wholes, "default": default, "metavar": metavar, "help": help}


def _name(words: tuple[str, ...], default: str, help: str) -> dict[str, Any]:
    return {"type": choice(words), "default": default, "metavar": "NAME", "help": help}


def _names(module: str, table: str) -> tuple[str, ...]:
    return tuple(getattr(import_module(module), table))


def _listed(title: str, names: tuple[str, ...]) -> str:
    return f"{title}:\n" + fill(
        "  ".join(names), WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )


def _policy(demo: str, usual: str) -> Arguments:
    return {
        "--policy": _name(
            _names(f"vcluster.demo.{demo}", "POLICIES"), usual, f"the layouts, see below ({usual})"
        )
    }


def _summaries(title: str, demo: str) -> str:
    policies = import_module(f"vcluster.demo.{demo}").POLICIES
    return "\n".join(
        [f"{title}:", *(f"  {name}\n      {policy.summary}" for name, policy in policies.items())]
    )


_BACKEND = {"--backend": _name(BACKENDS, usual_backend(), "run devices as process (default), thread or mpi")}
_HARDWARE = {
    "--hardware": {"metavar": "NAME", "help": "predict the time on a preset, as dgx-h100, or a hardware file"}
}
_PAGE = {
    "--html": {"type": Path, "metavar": "FILE.html", "help": "write the trace of the last step as a page"}
}
_TRACE = {"--trace": {"type": Path, "metavar": "FILE.json", "help": "save the trace of the last step"}}
_SCHEDULE = {
    "--schedule": {"default": "1f1b", "metavar": "NAME", "help": "schedule of the pipeline (1f1b)"},
    "--chunks": _count("stages on each device (1, or 2 if the schedule needs several)"),
}

_PARSERS: Mapping[str, Callable[[str], Parser]] = {
    "mlp": lambda name: _parser(
        name,
        "Trains a multilayer perceptron as a pipeline: its layers are split into stages,\n"
        "each stage is a process, and microbatches flow through them forward and\n"
        "backward. Then compares the numbers with the same training in one process, and\n"
        "shows time and bytes.",
        """\
--pp 4
      four stages, one layer in each
--pp 4 --schedule gpipe
      all forwards first: more activations to store
--pp 4 --schedule zero_bubble_v
      two stages on each device, backwards in two halves: a smaller bubble
--pp 4 --microbatches 2
      fewer microbatches: a larger bubble
--pp 2 --dp 2
      two replicas of a two-stage pipeline
--pp 6 --hidden 96,96,96,96,96
      six layers on six devices
--pp 4 --data mine.npz
      arrays x (rows, features) and y (rows,): classes 0, 1, ... or real values""",
        {
            **_SCHEDULE,
            "--microbatches": _count("microbatches of a batch (8)", 8),
            "--steps": _count("steps of the optimizer (40)", 40),
            "--hidden": _extents("N,N,...", None, "widths of the hidden layers (128,64,128)"),
            "--learning-rate": {
                "type": positive,
                "metavar": "X",
                "help": "of the optimizer (0.1 for classes, 0.01 for values)",
            },
            "--data": {
                "type": Path,
                "metavar": "FILE.npz",
                "help": "train on your arrays x and y (the digits)",
            },
            **_TRACE,
            **_HARDWARE,
            "--seed": _count("seed of the weights and of the split (0)", 0, least=0),
        },
        {"pp": "stages of the pipeline, one device each (default 4)", "dp": "replicas of the pipeline"},
        _listed("schedules", _names("parallelism.pipelining.generators", "SCHEDULES")),
    ),
    "gpt": lambda name: _parser(
        name,
        "Trains a small GPT on the docstrings of this package, byte by byte: stages of a\n"
        "pipeline over pp, heads, hidden dims and vocabulary over tp, replicas over dp.\n"
        "Then trains the same model in one process, compares losses, parameters and the\n"
        "bytes of each axis, and lets the devices generate a line.",
        """\
--dp 2 --pp 2 --tp 2
      eight processes, all three axes at once, as without options
--tp 4
      one stage, a head on each device
--pp 4 --schedule zero_bubble_h1
      four stages: the embedding, two blocks, the head
--pp 2 --tp 2 --blocks 4 --steps 300
      twice as deep, for longer: its spelling is better
--pp 1 --prompt "A rank " --seed 3
      one process, another prompt""",
        {
            **_SCHEDULE,
            "--microbatches": _count("microbatches of a batch (4)", 4),
            "--steps": _count("steps of the optimizer (100)", 100),
            "--rows": _count("rows of a batch, 32 bytes each (16)", 16, most=1024),
            "--blocks": _count("blocks between embedding and head (2)", 2, most=64),
            "--width": _count("width of the model (48)", 48),
            "--heads": _count("heads of attention (4)", 4),
            "--learning-rate": {
                "type": positive,
                "default": 0.005,
                "metavar": "X",
                "help": "of Adam (0.005)",
            },
            "--prompt": {"default": "A device ", "metavar": "TEXT", "help": "text to continue (A device )"},
            **_TRACE,
            **_HARDWARE,
            "--seed": _count("seed of weights, batches and the generated text (0)", 0, least=0),
        },
        {"pp": "stages of the pipeline", "dp": "replicas of the pipeline", "tp": "shards of every stage"},
    ),
    "generate": lambda name: _parser(
        name,
        "A small Transformer learns from the docstrings of this package, and completes\n"
        "lines: stages over pp, heads over tp, requests over dp, each device with its\n"
        "part of the cache of keys and values.  Then compares with one process.",
        """\
--tp 2 --pp 2
      two stages of two devices, as without options
--dp 2 --tp 2
      two replicas with requests of their own
--pp 2 --prompt "A mesh " --prompt "The "
      your own prompts; they may have different lengths
--tp 4
      heads of keys and values are copied, as there are only two""",
        {
            "--tokens": _count("tokens to generate (24)", 24, most=160),
            "--steps": _count("steps of training (80)", 80, least=0, most=5000),
            "--blocks": _count("blocks (2)", 2, most=32),
            "--temperature": {
                "type": lambda text: 0.0 if text == "0" else positive(text),
                "default": 0.5,
                "metavar": "X",
                "help": "of what is drawn; 0: the most likely token (0.5)",
            },
            "--prompt": {"action": "append", "metavar": "TEXT", "help": "text to continue; may be repeated"},
            **_HARDWARE,
            "--seed": _count("seed of weights, batches and what is drawn (0)", 0, least=0),
        },
        {"pp": "stages of the pipeline", "dp": "replicas", "tp": "shards of every stage"},
    ),
    "collectives": lambda name: _parser(
        name,
        "Shows one collective step by step on small arrays: which device sends what\n"
        "where, and what each device holds after each step. Then runs it, and compares\n"
        "values and bytes.",
        "--devices 4 --algorithm ring\n--algorithm recursive_doubling\n--devices 3 --collective broadcast",
        {
            "--devices": _count("number of devices, up to 16 (4)", 4, most=16),
            "--collective": _name(
                _names("parallelism.algorithms", "COLLECTIVES"), "all_reduce", "the collective (all_reduce)"
            ),
            "--algorithm": {"metavar": "NAME", "help": "its algorithm (ring if there is one)"},
        },
        after=_listed("collectives", _names("parallelism.algorithms", "COLLECTIVES")),
    ),
    "matmul": lambda name: _parser(
        name,
        "Multiplies two sharded matrices, C[m, n] = A[m, k] B[k, n], under a policy that\n"
        "says which dims are split over which axes of the mesh. Shows the layouts and\n"
        "the traffic; compares with NumPy, and with the closed form of the bytes.",
        "--policy matched_inner --tp 4\n--policy outer --dp 2 --tp 2\n--policy full --mesh x=2,y=4",
        {
            **_policy("matmul", "matched_inner"),
            "--shape": _extents("M,K,N", (96, 120, 72), "extents of the product (96,120,72)"),
            **_HARDWARE,
        },
        {"dp": "devices along dp, for two axes", "tp": "devices along tp (default 4)"},
        _summaries("policies, over an axis X of the mesh, or over its two, X and Y", "matmul"),
    ),
    "ffn": lambda name: _parser(
        name,
        "Runs the feed-forward block of a Transformer on a mesh, forward and backward,\n"
        "under a policy that says how activations and weights are sharded. Compares\n"
        "output and gradients with one process, and the bytes with the plan's.",
        "--policy megatron --tp 4\n--policy sequence --dp 2 --tp 2\n--policy gspmd_2d --mesh x=2,y=2",
        {
            **_policy("ffn", "megatron"),
            "--shape": _extents("B,S,M,F", (4, 12, 16, 32), "batch, sequence, model, hidden (4,12,16,32)"),
            "--activation": _name(("gelu", "relu"), "gelu", "gelu (default) or relu"),
            **_HARDWARE,
        },
        {"dp": "devices along dp, for the batch", "tp": "devices along tp (default 4)"},
        _summaries("policies", "ffn"),
    ),
    "attention": lambda name: _parser(
        name,
        "Runs attention on a mesh, forward and backward, under a policy that says how\n"
        "rows and heads are sharded. Draws which keys each device has at each step,\n"
        "compares results with one process and bytes with the plan's, and the policies\n"
        "with each other: bytes, and peak memory of a device.",
        "--policy ring --cp 4\n--policy ring --cp 4 --zigzag\n--policy ulysses --cp 2 --dp 2\n"
        "--policy megatron_ring --cp 2 --tp 2",
        {
            **_policy("attention", "ring"),
            "--shape": _extents("B,S,H,D", (2, 16, 4, 8), "batch, sequence, heads, head_dim (2,16,4,8)"),
            "--kv-heads": _count("key-value heads (as many as heads)"),
            "--full": {"action": "store_true", "help": "no causal mask: every row attends to every row"},
            "--zigzag": {"action": "store_true", "help": "the rows of a causal ring in zigzag order"},
            **_HARDWARE,
        },
        {
            "dp": "devices along dp, for the batch",
            "cp": "devices along cp, for the sequence",
            "tp": "devices along tp, for the heads",
        },
        _summaries("policies", "attention"),
    ),
    "moe": lambda name: _parser(
        name,
        "Runs a mixture of experts on a mesh, forward and backward: a router sends each\n"
        "token to a few experts on different devices. Shows which token goes where, what\n"
        "is dropped, and what the all_to_alls move; compares with one process.",
        "--ep 4\n--ep 4 --top-k 1 --capacity 0.75\n--dp 2 --ep 3 --experts 7",
        {
            "--experts": _count("number of experts (6)", 6),
            "--top-k": {**_count("experts for each token (2)", 2), "metavar": "K"},
            "--capacity": {
                "type": positive,
                "default": 1.0,
                "metavar": "X",
                "help": "capacity factor of an expert, 1 for an even share (1.0)",
            },
            "--shape": _extents("B,S,M,F", (2, 12, 8, 16), "batch, sequence, model, hidden (2,12,8,16)"),
            **_HARDWARE,
        },
        {"dp": "devices along dp, for the batch", "ep": "devices along ep, for the experts (default 4)"},
        "an expert takes at most capacity * top-k * tokens / experts choices, first ones\n"
        "before second ones, earlier tokens before later ones; the others are dropped",
    ),
    "plan": lambda name: _parser(
        name,
        "Finds the best split of a training step of a small GPT over described devices,\n"
        "shows the best plans and where the time of the first goes. Then runs a smaller\n"
        "model under that plan here, and compares it with one process and with its\n"
        "simulation. `python -m vcluster plan` does this for models of any size.",
        "--devices 8\n--devices 16 --hardware dgx-a100 --layers 8\n--memory 60MB",
        {
            "--devices": _count("number of described devices (4)", 4, most=64),
            "--hardware": {
                "default": "dgx-h100",
                "metavar": "NAME",
                "help": "the described hardware (dgx-h100)",
            },
            "--layers": _count("layers of the model (4)", 4, most=64),
            "--rows": _count("sequences of a step (8)", 8, most=1024),
            "--memory": {"metavar": "60MB", "help": "memory of a device that may be used (all)"},
        },
    ),
    "reshard": lambda name: _parser(
        name,
        "Plans how a tensor gets from one layout to another, draws both, runs the plan,\n"
        "and compares values and bytes. A layout names, for each dim, the axes it is\n"
        "split over: [x, None], [(x, y), None], [None, None] partial=x.",
        '"[x, None]" "[None, x]"\n"[x, y]" "[y, x]" --mesh x=2,y=3 --shape 7,5\n'
        '"[None, None] partial=x" "[x, None]"',
        {
            "source": {"metavar": "SOURCE", "nargs": "?", "help": "the layout before (an example: [x, y])"},
            "target": {"metavar": "TARGET", "nargs": "?", "help": "the layout after ([y, x])"},
            "--mesh": {
                "metavar": "AXES",
                "help": "the mesh: x=2,y=4 (2 devices along each axis that is named)",
            },
            "--shape": _extents("N,N,...", None, "shape of the tensor (8,6,10,4, as many as dims)"),
            **_HARDWARE,
        },
    ),
}
"""The parser of each demo. It is made on demand, because the names in it come from modules that load NumPy."""


def parser_of(name: str) -> Parser:
    """The parser of a demo. The demo's module has the same name."""
    return _PARSERS[name](name)
