"""What a wrong name may mean: a known name that is close, or the name that another library has for the same thing.

The names elsewhere are those of torch.distributed, JAX, mpi4py and Megatron-LM.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from typing import Any, NoReturn, TypeVar

Called = TypeVar("Called", bound=Callable[..., Any])

KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "axis": ("axes", "dim"),
    "axisname": ("axes",),
    "meshaxis": ("axes",),
    "meshdim": ("axes",),
    "group": ("groups", "axes"),
    "processgroup": ("groups", "axes"),
    "comm": ("axes", "groups"),
    "axisindexgroups": ("groups",),
    "pg": ("groups", "axes"),
    "dst": ("root",),
    "dest": ("dst", "root"),
    "destination": ("dst",),
    "to": ("dst",),
    "target": ("dst",),
    "peer": ("dst", "src"),
    "src": ("root",),
    "source": ("src", "root"),
    "from": ("src",),
    "sender": ("src",),
    "rootrank": ("root",),
    "groupsrc": ("root",),
    "groupdst": ("root",),
    "srcrank": ("root",),
    "reduceop": ("op",),
    "operation": ("op", "name"),
    "reduction": ("op",),
    "operator": ("op",),
    "dims": ("dim",),
    "dimension": ("dim",),
    "gatherdim": ("dim",),
    "scatterdim": ("dim",),
    "allgatherdim": ("dim",),
    "scatterdimension": ("dim",),
    "gatheraxis": ("dim",),
    "tensordim": ("dim",),
    "splitaxis": ("split_dim",),
    "splitdimension": ("split_dim",),
    "inputsplitsizes": ("split_sizes",),
    "concataxis": ("concat_dim",),
    "concatdimension": ("concat_dim",),
    "outputsplitsizes": ("split_sizes",),
    "async": ("async_op",),
    "asynchronous": ("async_op",),
    "nonblocking": ("async_op",),
    "blocking": ("async_op",),
    "output": ("out",),
    "outputtensor": ("out",),
    "outputtensorlist": ("out",),
    "recvbuf": ("out",),
    "gatherlist": ("out",),
    "buf": ("out",),
    "tensorlist": ("out",),
    "perm": ("pairs",),
    "permutation": ("pairs",),
    "sourcetargetpairs": ("pairs",),
    "shift": ("by",),
    "offset": ("by",),
    "steps": ("by",),
    "disp": ("by",),
    "displacement": ("by",),
    "sendtag": ("tag",),
    "recvtag": ("tag",),
    "grouptag": ("tag",),
    "type": ("kind",),
    "op": ("name",),
    "device": ("rank",),
    "ranks": ("rank",),
    "devices": ("rank",),
    "axesnames": ("axes",),
    "numstages": ("stages",),
    "ppsize": ("stages",),
    "pp": ("stages",),
    "nmicrobatches": ("microbatches",),
    "nummicrobatches": ("microbatches",),
    "microbatchcount": ("microbatches",),
    "vpp": ("chunks",),
    "virtualstages": ("chunks",),
    "nummodelchunks": ("chunks",),
    "interleave": ("chunks",),
    "layers": ("layer_sizes",),
    "sizes": ("layer_sizes",),
    "hiddensizes": ("layer_sizes",),
    "lossfn": ("loss",),
    "criterion": ("loss",),
    "nonlinearity": ("activation",),
    "rngseed": ("seed",),
    "key": ("seed",),
}
"""Keywords elsewhere, without case and underscores, and the parameters here that may be meant: the likeliest first."""

REMARKS: Mapping[str, str] = {
    "tiled": "all_gather joins along dim=; all_scatter gives the arrays as a list",
    "timeout": "a time limit is of the cluster: VirtualCluster(..., deadline_seconds=...)",
    "status": "a receive knows its source and tag, so there is no status",
    "sendbuf": "the array to send is the first argument",
    "tensor": "the array is the first argument",
    "keepdims": "a collective keeps all dims",
    "inputtensor": "the array is the first argument",
    "inputtensorlist": "device.all_scatter and device.all_to_all take one array",
}
"""Keywords elsewhere for which no parameter stands, and what to know instead."""

_MEANINGS = {
    "axes": "axes of the mesh",
    "groups": "lists of ranks",
    "dim": "a dim of the array",
    "root": "a position in the group",
    "dst": "the rank that receives",
    "src": "the rank that sends",
    "by": "places round the ring",
    "pairs": "(source, target) positions",
    "rank": "a rank or several",
}


def did_you_mean(word: object, names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """``; did you mean 'ring'?`` where one of the names is close to ``word``, else nothing.

    >>> did_you_mean("rnig", ["ring", "torus"])
    "; did you mean 'ring'?"
    """
    near = closest(word, names, cutoff=cutoff)
    return f"; did you mean {near!r}?" if near is not None else ""


def closest_few(word: object, names: Iterable[str], *, most: int = 3) -> list[str]:
    """The names that are written most like ``word``, the nearest first; none if none is a little like it.

    >>> closest_few("torsu", ["ring", "torus", "switch"])
    ['torus']
    """
    from difflib import get_close_matches

    spelt = {name.lower().replace("_", "-"): name for name in names}
    return [
        spelt[each] for each in get_close_matches(str(word)[:80].lower().replace("_", "-"), spelt, n=most)
    ]


def closest(word: object, names: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The name that is written most like ``word``, whatever the case and the underscores; None if none is close."""
    from difflib import get_close_matches  # takes a millisecond to import, and right names never need it

    spelt = {name.lower().replace("_", "-"): name for name in names}
    close = get_close_matches(str(word)[:80].lower().replace("_", "-"), spelt, n=1, cutoff=cutoff)
    return spelt[close[0]] if close else None


def spelt_alike(word: str, names: Iterable[Any]) -> str | None:
    """The name that differs from ``word`` in case, underscores and hyphens only; None if there is none."""
    return next((name for name in names if isinstance(name, str) and _plain(name) == _plain(word)), None)


def unexpected_keyword(call: str, keyword: str, parameters: Collection[str]) -> TypeError:
    """The error of a call that has no parameter ``keyword``. It names the one that is meant, or all that there are.

    >>> print(unexpected_keyword("device.broadcast", "src", ["axes", "root"]))
    device.broadcast takes no src=; did you mean root= (a position in the group)?
    """
    plain = _plain(keyword)
    meant = [name for name in KEYWORDS.get(plain, ()) if name in parameters]
    if not meant and plain in REMARKS:
        return TypeError(f"{call} takes no {keyword}=; {REMARKS[plain]}")
    if not meant and (near := closest(keyword, parameters)) is not None:
        meant = [near]
    if not meant:
        known = ", ".join(f"{name}=" for name in parameters)
        return TypeError(f"{call} takes no {keyword}=" + (f"; it takes {known}" if known else ""))
    texts = []
    for name in meant:
        texts.append(f"{name}= ({_MEANINGS[name]})" if name in _MEANINGS else f"{name}=")
    return TypeError(f"{call} takes no {keyword}=; did you mean {' or '.join(texts)}?")


def explains_keywords(call: str) -> Callable[[Called], Called]:
    """A decorator: `unexpected_keyword` answers a keyword that a function, or the ``__init__`` of a class, lacks.

    Each call goes through one more function, so calls that kernels make in loops do without.
    """

    def decorate(function: Called) -> Called:
        if isinstance(function, type):
            type.__setattr__(function, "__init__", decorate(vars(function)["__init__"]))
            return function

        @wraps(function)
        def explained(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError:
                wrong = [name for name in kwargs if name not in parameters_of(function)]
                if not wrong:
                    raise
                error = unexpected_keyword(call, wrong[0], parameters_of(function))
            raise error

        return explained  # type: ignore[return-value]  # wraps() keeps what it is called with

    return decorate


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters of a function or method, without ``self``, ``*args`` and ``**kwargs``."""
    from inspect import Parameter, signature

    starred = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [
        name
        for name, one in signature(function).parameters.items()
        if name != "self" and one.kind not in starred
    ]


def no_attribute(thing: str, of: object, name: str, elsewhere: Mapping[str, str]) -> NoReturn:
    """Raise the ``AttributeError`` of a ``thing`` (such as "device") that has no ``name``, with what is meant.

    ``elsewhere`` has names of other libraries, without case and underscores, and what to write here.
    """
    hint = ""
    if not name.startswith("_"):
        meant = elsewhere.get(_plain(name))
        if meant is None and (
            near := closest(name, (one for one in dir(type(of)) if not one.startswith("_")))
        ):
            meant = f"{thing}.{near}"
        hint = f"; did you mean {meant}?" if meant else ""
    raise AttributeError(f"a {thing} has no {name!r}{hint}", name=name, obj=of)


def no_public_name(package: str, name: str, names: Collection[str]) -> NoReturn:
    """Raise the ``AttributeError`` of a package that has no ``name``, with the name that is meant."""
    meant = None
    if not name.startswith("_"):
        meant = _PUBLIC.get(_plain(name)) or closest(name, names, cutoff=0.75)
    hint = f"; did you mean {meant}?" if meant else ""
    raise AttributeError(
        f"module {package!r} has no attribute {name!r}{hint}", name=name, obj=sys.modules.get(package)
    )


_PUBLIC = {
    "partitionspec": "TensorSharding('dp', None)",
    "p": "TensorSharding('dp', None)",
    "namedsharding": "TensorSharding('dp', None), which goes with a Mesh",
    "shard": "TensorSharding('dp', None)",
    "replicate": "TensorSharding.replicated(ndim)",
    "dtensor": "Sharded(x, TensorSharding('dp', None))",
    "distributetensor": "Sharded(x, TensorSharding('dp', None))",
    "devicemesh": "Mesh(dp=2, tp=4)",
    "initdevicemesh": "Mesh(dp=2, tp=4)",
    "makemesh": "Mesh(dp=2, tp=4)",
    "spawn": "VirtualCluster(4).run(kernel)",
    "initprocessgroup": "VirtualCluster(4)",
    "launch": "VirtualCluster(4).run(kernel)",
    "shardmap": "VirtualCluster(4).run(kernel)",
    "pmap": "VirtualCluster(4).run(kernel)",
    "commworld": "VirtualCluster(4)",
    "reduceop": "op='sum'",
    "redistribute": "plan_resharding",
    "cluster": "VirtualCluster",
}
"""Public names of other libraries, without case and underscores, and what to write here."""


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
