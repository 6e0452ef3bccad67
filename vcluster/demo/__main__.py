"""``python -m vcluster.demo`` lists the demos or runs one of them."""

import sys
from collections.abc import Sequence
from importlib import import_module

from vcluster.cli.command_line import WrongWords, accessing, nearest, serve, writable
from vcluster.code import ClusterError
from vcluster.demo.options import PROGRAM, parser_of

DEMOS = {
    "mlp": "train a perceptron on handwritten digits, as a pipeline",
    "gpt": "train a small GPT on pipeline stages, shards and replicas at once",
    "generate": "a small model completes text, split over stages and shards",
    "collectives": "one collective, step by step: which device sends what where",
    "matmul": "a sharded matrix product: layouts, plan and traffic",
    "ffn": "a sharded feed-forward block, forward and backward",
    "attention": "sharded attention: which keys each device has at each step",
    "moe": "a mixture of experts: which token goes to which device",
    "plan": "the best split of a training step over described devices, and why",
    "reshard": "a tensor from one layout to another: plan and traffic",
}

LIST = f"""Demos on a cluster of real processes on this machine:

{chr(10).join(f"  {name:<13}{summary}" for name, summary in DEMOS.items())}

Start with {PROGRAM} mlp --pp 4
Every demo explains its options with --help."""


def main(words: Sequence[str]) -> int:
    """Run the demo that the words name. Returns the exit status."""
    if not words or words[0] in ("-h", "--help"):
        print(LIST)
        return 0
    name, *rest = words
    if name not in DEMOS:
        if name.startswith("-"):
            raise WrongWords(f"name the demo first: {', '.join(DEMOS)}; got {name!r}")
        raise WrongWords(f"there is no demo {name!r}{nearest(name, tuple(DEMOS))}")
    try:
        arguments = parser_of(name).parse(rest)
        from vcluster.demo.screen import (
            Screen,
        )  # imported after the arguments are checked, because it is slow

        screen = Screen()
        if arguments.html is not None:
            writable(arguments.html, "html")
        import_module(f"vcluster.demo.{name}").run_demo(arguments, screen)
        if arguments.html is not None and screen.record is not None:
            from vcluster.report import html

            (trace, hardware), page = screen.record, arguments.html
            with accessing(page, option="html"):
                html(trace, page, hardware=hardware)
            screen.line(f"\nThe page of that step is in {page}")
        return int(not screen.good)
    except WrongWords as error:
        error.command = name
        raise
    except RuntimeError as error:
        if not isinstance(error, ClusterError) and type(error) is not RuntimeError:
            raise  # a bug in the demo; the other errors describe a problem of the cluster or of this system
        print(f"{PROGRAM} {name}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(serve(PROGRAM, main))
