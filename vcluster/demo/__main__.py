"""``python -m vcluster.demo``: the list of demos, and the words each of them understands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from vcluster.code import ClusterError
from vcluster.demo.command_line import Parser, WrongWords, add_mesh, choice, nearest, positive, serve, whole, wholes

PROGRAM = "python -m vcluster.demo"

DEMOS = {
    "mlp": "train a perceptron on handwritten digits, as a pipeline",
    "gpt": "train a small GPT on pipeline stages, shards and replicas at once",
    "collectives": "one collective, step by step: who sends what to whom",
    "matmul": "a sharded matrix product: who holds what, what moves",
    "ffn": "a sharded feed-forward block, forward and backward",
    "attention": "sharded attention: who attends to whose keys at each step",
    "moe": "a mixture of experts: which token goes to which device",
    "reshard": "a tensor from one layout to another: the plan, run",
}

LIST = f"""A cluster of real processes on this machine, shown at work:

{chr(10).join(f"  {name:<13}{what}" for name, what in DEMOS.items())}

Start with {PROGRAM} mlp --pp 4
Every demo explains itself with --help."""


def mlp_parser() -> Parser:
    """The words of the mlp demo."""
    from parallelism.pipelining.generators import SCHEDULES
    from vcluster.demo.screen import fold

    parser = Parser(
        prog=f"{PROGRAM} mlp",
        description=(
            "Trains a multilayer perceptron as a pipeline: its layers are dealt to stages,\n"
            "each stage is a process, and microbatches flow through them forward and\n"
            "backward. Then says whether the numbers are those of the same training in one\n"
            "process, and what it cost."
        ),
        epilog=f"""schedules:
{fold(tuple(SCHEDULES))}

examples:
  {PROGRAM} mlp --pp 4
      four stages, one layer in each
  {PROGRAM} mlp --pp 4 --schedule gpipe
      all forwards first: more to hold
  {PROGRAM} mlp --pp 4 --schedule zero_bubble_v
      two stages on each device, backwards in two halves: hardly a bubble
  {PROGRAM} mlp --pp 4 --microbatches 2
      fewer microbatches: a larger bubble
  {PROGRAM} mlp --pp 2 --dp 2
      two replicas of a two-stage pipeline
  {PROGRAM} mlp --pp 6 --hidden 96,96,96,96,96
      six layers on six devices
  {PROGRAM} mlp --pp 4 --data mine.npz
      arrays x (rows, features) and y (rows,): classes 0, 1, ... or real values""",
    )
    add_mesh(
        parser, pp="stages of the pipeline, a device each (default 1)", dp="replicas of the pipeline"
    )
    parser.add_argument("--schedule", default="1f1b", metavar="NAME", help="order of the work (1f1b)")
    parser.add_argument(
        "--chunks", type=whole(), metavar="N", help="stages on each device (1, or 2 where the schedule has several)"
    )
    parser.add_argument("--microbatches", type=whole(), default=8, metavar="N", help="pieces a batch is cut into (8)")
    parser.add_argument("--steps", type=whole(), default=40, metavar="N", help="steps of the optimizer (40)")
    parser.add_argument(
        "--hidden", type=wholes, metavar="N,N,...",
        help="widths between input and output; one layer more than numbers (128,64,128)",
    )
    parser.add_argument(
        "--learning-rate", type=positive, metavar="X", help="of the optimizer (0.1 for classes, 0.01 for values)"
    )
    parser.add_argument("--data", type=Path, metavar="FILE.npz", help="train on your arrays x and y (the digits)")
    parser.add_argument("--trace", type=Path, metavar="FILE.json", help="save the record of the last step")
    parser.add_argument("--html", type=Path, metavar="FILE.html", help="the same as a page to look at")
    _add_hardware(parser)
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of the weights and of the split (0)")
    _add_backend(parser)
    return parser


def gpt_parser() -> Parser:
    """The words of the gpt demo."""
    parser = Parser(
        prog=f"{PROGRAM} gpt",
        description=(
            "Trains a small GPT on the docstrings of this package, byte by byte: stages of a\n"
            "pipeline over pp, heads, hidden dims and vocabulary over tp, replicas over dp.\n"
            "Then trains the same in one process, says whether losses and parameters are\n"
            "equal, what moved over which axis, and lets the devices write a line."
        ),
        epilog=f"""examples:
  {PROGRAM} gpt --dp 2 --pp 2 --tp 2
      eight processes, all three ways at once
  {PROGRAM} gpt --tp 4
      one stage, a head on each device
  {PROGRAM} gpt --pp 4 --schedule zero_bubble_h1
      four stages: the embedding, two blocks, the head
  {PROGRAM} gpt --pp 2 --tp 2 --blocks 4 --steps 300
      twice as deep, for longer: it spells better
  {PROGRAM} gpt --prompt "A rank " --seed 3
      one process, another text to go on from""",
    )
    add_mesh(
        parser, pp="stages of the pipeline (default 1)", dp="replicas of the pipeline", tp="shards of every stage"
    )
    parser.add_argument("--schedule", default="1f1b", metavar="NAME", help="order of the work (1f1b)")
    parser.add_argument(
        "--chunks", type=whole(), metavar="N", help="stages on each device (1, or 2 where the schedule has several)"
    )
    parser.add_argument("--microbatches", type=whole(), default=4, metavar="N", help="pieces a batch is cut into (4)")
    parser.add_argument("--steps", type=whole(), default=100, metavar="N", help="steps of the optimizer (100)")
    parser.add_argument("--rows", type=whole(1, 1024), default=16, metavar="N", help="of a batch, 32 bytes each (16)")
    parser.add_argument("--blocks", type=whole(1, 64), default=2, metavar="N", help="between embedding and head (2)")
    parser.add_argument("--width", type=whole(), default=48, metavar="N", help="of what goes from block to block (48)")
    parser.add_argument("--heads", type=whole(), default=4, metavar="N", help="of attention (4)")
    parser.add_argument("--learning-rate", type=positive, default=0.005, metavar="X", help="of Adam (0.005)")
    parser.add_argument("--prompt", default="A device ", metavar="TEXT", help="what it goes on from (A device )")
    parser.add_argument("--trace", type=Path, metavar="FILE.json", help="save the record of the last step")
    _add_hardware(parser)
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of weights, batches and writing (0)")
    _add_backend(parser)
    return parser


def collectives_parser() -> Parser:
    """The words of the collectives demo."""
    from parallelism.collectives import algorithms as communication
    from vcluster.demo.screen import fold

    kinds = tuple(communication.COLLECTIVES)
    parser = Parser(
        prog=f"{PROGRAM} collectives",
        description=(
            "Shows one collective step by step on small arrays: who sends what to whom, and\n"
            "what every device holds after each step. Then really runs it, and compares\n"
            "values and bytes."
        ),
        epilog=f"""examples:
  {PROGRAM} collectives --devices 4 --algorithm ring
  {PROGRAM} collectives --algorithm recursive_doubling
  {PROGRAM} collectives --devices 3 --collective broadcast

collectives:
{fold(kinds)}""",
    )
    parser.add_argument("--devices", type=whole(1, 16), default=4, metavar="N", help="how many take part, up to 16 (4)")
    parser.add_argument(
        "--collective", type=choice(kinds), default="all_reduce", metavar="NAME", help="which one (all_reduce)"
    )
    parser.add_argument("--algorithm", metavar="NAME", help="how (ring where there is one)")
    _add_backend(parser)
    return parser


def matmul_parser() -> Parser:
    """The words of the matmul demo."""
    from vcluster.demo.matmul import POLICIES

    parser = Parser(
        prog=f"{PROGRAM} matmul",
        description=(
            "Multiplies two sharded matrices, C[m, n] = A[m, k] B[k, n], under a policy that\n"
            "says which dims lie over which axes of the mesh. Shows who holds what and what\n"
            "has to move; compares with NumPy, and with the closed form of the bytes."
        ),
        epilog=f"""policies, over an axis X of the mesh, or over its two, X and Y:
{_summaries(POLICIES)}

examples:
  {PROGRAM} matmul --policy matched_inner --tp 4
  {PROGRAM} matmul --policy outer --dp 2 --tp 2
  {PROGRAM} matmul --policy full --mesh x=2,y=4""",
    )
    parser.add_argument(
        "--policy", type=choice(tuple(POLICIES)), default="matched_inner", metavar="NAME",
        help="what is sharded (matched_inner)",
    )
    add_mesh(parser, dp="devices along dp, for two axes", tp="devices along tp (default 4)")
    parser.add_argument(
        "--shape", type=wholes, default=(96, 120, 72), metavar="M,K,N", help="extents of the product (96,120,72)"
    )
    _add_hardware(parser)
    _add_backend(parser)
    return parser


def ffn_parser() -> Parser:
    """The words of the ffn demo."""
    from vcluster.demo.ffn import POLICIES

    parser = Parser(
        prog=f"{PROGRAM} ffn",
        description=(
            "Runs the feed-forward block of a Transformer on a mesh, forward and backward,\n"
            "under a policy that says how activations and weights are sharded. Compares\n"
            "output and gradients with one process, and the bytes with the plan's."
        ),
        epilog=f"""policies:
{_summaries(POLICIES)}

examples:
  {PROGRAM} ffn --policy megatron --tp 4
  {PROGRAM} ffn --policy sequence --dp 2 --tp 2
  {PROGRAM} ffn --policy gspmd_2d --mesh x=2,y=2""",
    )
    parser.add_argument(
        "--policy", type=choice(tuple(POLICIES)), default="megatron", metavar="NAME", help="how (megatron)"
    )
    add_mesh(parser, dp="devices along dp, for the batch", tp="devices along tp (default 4)")
    parser.add_argument(
        "--shape", type=wholes, default=(4, 12, 16, 32), metavar="B,S,M,F",
        help="batch, sequence, model, hidden (4,12,16,32)",
    )
    parser.add_argument("--activation", type=choice(("gelu", "relu")), default="gelu", metavar="NAME", help="or relu")
    _add_hardware(parser)
    _add_backend(parser)
    return parser


def attention_parser() -> Parser:
    """The words of the attention demo."""
    from vcluster.demo.attention import POLICIES

    parser = Parser(
        prog=f"{PROGRAM} attention",
        description=(
            "Runs attention on a mesh, forward and backward, under a policy that says how\n"
            "rows and heads are sharded. Draws who has which keys at each step, compares\n"
            "results with one process and bytes with the plan's, and the policies with each\n"
            "other: bytes, and the most memory that a device holds."
        ),
        epilog=f"""policies:
{_summaries(POLICIES)}

examples:
  {PROGRAM} attention --policy ring --cp 4
  {PROGRAM} attention --policy ring --cp 4 --zigzag
  {PROGRAM} attention --policy ulysses --cp 2 --dp 2
  {PROGRAM} attention --policy megatron_ring --cp 2 --tp 2""",
    )
    parser.add_argument("--policy", type=choice(tuple(POLICIES)), default="ring", metavar="NAME", help="how (ring)")
    add_mesh(parser, dp="devices along dp, for the batch", cp="devices along cp, for the sequence",
             tp="devices along tp, for the heads")
    parser.add_argument(
        "--shape", type=wholes, default=(2, 16, 4, 8), metavar="B,S,H,D",
        help="batch, sequence, heads, head_dim (2,16,4,8)",
    )
    parser.add_argument("--kv-heads", type=whole(), metavar="N", help="key-value heads (as many as heads)")
    parser.add_argument("--full", action="store_true", help="every row sees every row; causal otherwise")
    parser.add_argument("--zigzag", action="store_true", help="the rows of a causal ring in zigzag order")
    _add_hardware(parser)
    _add_backend(parser)
    return parser


def moe_parser() -> Parser:
    """The words of the moe demo."""
    parser = Parser(
        prog=f"{PROGRAM} moe",
        description=(
            "Runs a mixture of experts on a mesh, forward and backward: a router sends each\n"
            "token to a few experts, which lie on different devices. Shows who goes where,\n"
            "what finds no room, and what the all_to_alls move; compares with one process."
        ),
        epilog=f"""an expert takes at most capacity * top-k * tokens / experts choices, first ones
before second ones, earlier tokens before later ones; the rest is dropped

examples:
  {PROGRAM} moe --ep 4
  {PROGRAM} moe --ep 4 --top-k 1 --capacity 0.75
  {PROGRAM} moe --dp 2 --ep 3 --experts 7""",
    )
    add_mesh(parser, dp="devices along dp, for the batch", ep="devices along ep, for the experts (default 4)")
    parser.add_argument("--experts", type=whole(), default=6, metavar="N", help="how many (6)")
    parser.add_argument("--top-k", type=whole(), default=2, metavar="K", help="experts for each token (2)")
    parser.add_argument(
        "--capacity", type=positive, default=1.0, metavar="X", help="room of an expert, 1 for an even share (1.0)"
    )
    parser.add_argument(
        "--shape", type=wholes, default=(2, 12, 8, 16), metavar="B,S,M,F",
        help="batch, sequence, model, hidden (2,12,8,16)",
    )
    _add_hardware(parser)
    _add_backend(parser)
    return parser


def reshard_parser() -> Parser:
    """The words of the reshard demo."""
    parser = Parser(
        prog=f"{PROGRAM} reshard",
        description=(
            "Plans how a tensor gets from one layout to another, draws both, runs the plan,\n"
            "and compares values and bytes. A layout names, for each dim, the axes it is\n"
            "split over: [x, None], [(x, y), None], [None, None] partial=x."
        ),
        epilog=f"""examples:
  {PROGRAM} reshard "[x, None]" "[None, x]"
  {PROGRAM} reshard "[x, y]" "[y, x]" --mesh x=2,y=3 --shape 7,5
  {PROGRAM} reshard "[None, None] partial=x" "[x, None]" """.rstrip(),
    )
    parser.add_argument("source", metavar="SOURCE", help="the layout it has")
    parser.add_argument("target", metavar="TARGET", help="the layout it is to have")
    parser.add_argument("--mesh", metavar="AXES", help="the mesh: x=2,y=4 (2 devices along each axis that is named)")
    parser.add_argument("--shape", type=wholes, metavar="N,N,...", help="of the tensor (8,6,10,4, as many as dims)")
    _add_hardware(parser)
    _add_backend(parser)
    return parser


def _summaries(policies: Mapping[str, Any]) -> str:
    return "\n".join(f"  {name}\n      {policy.summary}" for name, policy in policies.items())


def _add_hardware(parser: Parser) -> None:
    parser.add_argument(
        "--hardware", metavar="NAME", help="what it would take there: a preset, as dgx-h100, or a file"
    )


def _add_backend(parser: Parser) -> None:
    parser.add_argument(
        "--backend", type=choice(("process", "thread")), default="process", metavar="NAME",
        help="what a device is: process (default) or thread",
    )


PARSERS: dict[str, Callable[[], Parser]] = {
    "mlp": mlp_parser, "gpt": gpt_parser, "collectives": collectives_parser, "matmul": matmul_parser,
    "ffn": ffn_parser, "attention": attention_parser, "moe": moe_parser, "reshard": reshard_parser,
}
"""By demo, which is the module of the same name."""


def main(words: Sequence[str]) -> int:
    """Runs the demo that the words name; the exit status."""
    if not words or words[0] in ("-h", "--help"):
        print(LIST)
        return 0
    name, *rest = words
    if name not in DEMOS:
        if name.startswith("-"):
            raise WrongWords(f"name the demo first: {', '.join(DEMOS)}; got {name!r}")
        raise WrongWords(f"there is no demo {name!r}{nearest(name, tuple(DEMOS))}")
    try:
        arguments = PARSERS[name]().parse(rest)
        demo = import_module(f"vcluster.demo.{name}")     # after the words are right: these load what they run
        status: int = demo.show(arguments)
        return status
    except WrongWords as error:
        error.command = name
        raise
    except RuntimeError as error:
        if not isinstance(error, ClusterError) and type(error) is not RuntimeError:
            raise  # a mistake of ours; the others say what is wrong with the cluster, or with this system
        print(f"{PROGRAM} {name}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(serve(PROGRAM, main))
