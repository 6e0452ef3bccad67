"""The only module that imports ``torch``: programs of modules of PyTorch, by its exporter to ONNX."""

from __future__ import annotations

import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from typing import Any

import numpy as np

from parallelism.arrays import vector_shape
from parallelism.dtypes import as_dtype, is_narrow
from parallelism.interop.errors import (
    EvaluationWarning,
    SizesWarning,
    UnsupportedError,
    named,
    warn_of_own_derivatives,
)
from parallelism.interop.onnx_models.files import Model
from parallelism.interop.onnx_models.programs import Imported, imported
from parallelism.interop.torch_checks import without_checks_of_numbers
from parallelism.interop.torch_decisions import decided_masks
from parallelism.interop.torch_derivatives import corners, detach_ungraded, lost_derivatives
from parallelism.interop.torch_embeddings import bags_of_rows, embedding
from parallelism.interop.torch_experts import dealt_experts
from parallelism.interop.torch_forms import (
    attention,
    complex_numbers,
    cumulative_products,
    for_any_rows,
    means_of_all,
    of_any_sizes,
    places_in_order,
)
from parallelism.interop.torch_masks import masked_writes
from parallelism.interop.torch_meta import on_the_host, zeros
from parallelism.interop.torch_refusals import lines_of_the_loss, refusal
from parallelism.interop.torch_sizes import Bounds, lengths_are_sizes, lines_that_fix_sizes, within_bounds
from parallelism.interop.torch_sorting import sizes_of_groups, sorted_rows
from parallelism.ir.core import Expression, TensorType

ROWS = "B"
"""The symbol for the first dim of the examples, if nothing else is said."""
WRAPPED = "model"
OPSET = 23
"""It has attention, rotary positions and root mean square norms as operators."""
LARGE = 4096
"""Tensors of more bytes do not pass through ONNX: only their shapes do."""
_ONE_AT_A_TIME = threading.RLock()
"""Exports of several threads take turns: each changes PyTorch, the module, and the names in its file, until it ends."""


@cache
def _torch() -> Any:
    """The package, with its exporter.  ``ImportError`` says what to install."""
    try:
        import onnxscript  # noqa: F401  (the exporter needs it)
        import torch
    except ImportError as error:
        raise ImportError(
            'modules of PyTorch are exported by torch and onnxscript: pip install "vcluster[torch]"'
        ) from error
    return torch


def from_torch(
    module: Any,
    *examples: Any,
    loss: Callable[..., Any] | None = None,
    dynamic: Sequence[Mapping[int, str]] | Mapping[str, Mapping[int, str]] | None = None,
) -> Imported:
    """The program of a module of PyTorch, and its weights, by ``torch.export`` and its exporter to ONNX.

    ``examples`` are the arguments of the module: tensors, or `ir.TensorType` for their shapes, in which extents may be
    symbols.  With a ``loss``, the last of them are those of the loss behind the result of the module: the program is
    that of ``loss(module(x), targets)``, which `find_plan` takes.

    ``dynamic`` gives the dims that are symbols, as ``{"ids": {0: "B", 1: "time"}}`` or ``[{0: "B"}, {0: "B"}]``.  None:
    those of the `ir.TensorType`; of tensors the first dim, with the symbol ``B``.

    Parameters are the inputs named ``p.`` and their name in ``state_dict``, and the weights share their memory. Complex
    ones have a last dim more, of the real and the imaginary part. Buffers are constants; a larger one is an input.
    Parameters without ``requires_grad`` are frozen, if others have it (`parallelism.transforms.frozen`).

    What lies on the meta device has no numbers: a model that is too large for memory, made under
    ``torch.device("meta")``, is planned as any other, and ``weights`` is empty; its buffers are inputs.

    Ops know their line and are in regions named after the modules. It is the program of evaluation (``module.eval()``):
    nothing is dropped out, and the module stays in the mode that it was in. Batch norms normalize by their running
    statistics; an `EvaluationWarning` names those that are in training. A module that asks for a size (``if len(x) >=
    64``) has a program for some sizes, which a `SizesWarning` tells. Experts of Hugging Face's transformers become
    `dispatch` and `combine`, so that they can be split over ``ep``. The backward of a ``torch.autograd.Function``, and
    what hooks do with gradients, is not in the program, which an `OwnDerivativeWarning` says.

    `UnsupportedError` for what PyTorch cannot export, and for an operator that programs do not have, with its line.

        program, weights = from_torch(model, ids, targets, loss=lambda z, t: F.cross_entropy(z.flatten(0, 1), t.flatten()))
        find_plan(program, hardware="dgx-h100", devices=64, batch=512)
    """
    torch = _torch()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"from_torch takes a torch.nn.Module, got {type(module).__name__}")
    if not examples:
        raise ValueError(
            "from_torch needs the arguments of the module: tensors, or ir.TensorType for their shapes"
        )
    _warn_of_batch_statistics(torch, module)
    whole, own = (module, len(examples)) if loss is None else _with_loss(torch, module, loss, len(examples))
    names = _names(module, loss, own, len(examples))
    dims = _dims(examples, names, dynamic)
    extents = _extents(whole, examples, dims)
    _given(torch, examples, names, dims, extents)  # refuses wrong examples before anything is exported
    with _ONE_AT_A_TIME, on_the_host(torch, whole) as unknown, lost_derivatives(torch, module) as lost:
        export = partial(_exported, torch, whole, examples, names, dims, extents)
        (proto, arrays, bounds), asked, has_elements = _decided(torch, whole, loss, export)
    _warn_of_bounds(bounds, type(module).__name__)
    _warn_of_masks(asked, has_elements, type(module).__name__)
    instead = "write the function in operators whose derivative is meant, or detach what it holds back"
    warn_of_own_derivatives(lost.functions, "torch.autograd.Function", instead, stacklevel=2)
    instead = "take away a hook that only looks, and write what one changes in operators of the model"
    warn_of_own_derivatives(lost.hooks, "a hook on gradients", instead, stacklevel=2)
    prefix = "" if whole is module else f"{WRAPPED}."
    weights = dict(whole.named_parameters(remove_duplicate=False))
    still = [name for name, weight in weights.items() if not weight.requires_grad]
    if len(still) == len(weights):
        still = []  # a module that is only evaluated: nothing is said about its training
    return imported(Model(proto, held=arrays), weights, prefix, type(module).__name__, still, unknown)


# -- the module and its examples ---------------------------------------------------------------------------------------


def _with_loss(torch: Any, module: Any, loss: Callable[..., Any], count: int) -> tuple[Any, int]:
    """A module that computes the loss, and how many of the examples are those of ``module``."""
    own = max(0, _required(loss) - 1)
    if own >= count:
        raise ValueError(
            f"the loss takes {own} values beside the result, and there are {count} examples in all"
        )
    of_module = count - own

    class Trained(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss = module, loss

        def forward(self, *given: Any) -> Any:
            return self.loss(self.model(*given[:of_module]), *given[of_module:])

    return Trained(), of_module


def _warn_of_batch_statistics(torch: Any, module: Any) -> None:
    """Gives `EvaluationWarning` if there are norms that normalize by the batch now, and will not in the program."""
    norms = [
        name or type(each).__name__
        for name, each in module.named_modules()
        if isinstance(each, torch.nn.modules.batchnorm._NormBase)
        and each.training
        and each.running_mean is not None
    ]
    if norms:
        warnings.warn(
            f"{named(norms)}: the program normalizes by running statistics, as in evaluation, and this module is in "
            f"training, where it normalizes by the batch; module.eval() says that this is meant",
            EvaluationWarning,
            stacklevel=3,
        )


def _warn_of_bounds(bounds: Mapping[str, Bounds], module: str) -> None:
    """Gives `SizesWarning` if there are symbols that the module sets bounds to."""
    if bounds:
        told = " and ".join(f"{name} of {of}" for name, of in bounds.items())
        warnings.warn(
            f"{module}: the program holds for {told}: the module asks for this size, and may compute something else beyond",
            SizesWarning,
            stacklevel=3,
        )


def _warn_of_masks(lines: Sequence[str], has_elements: bool, module: str) -> None:
    """Gives `SizesWarning` if there are lines that ask whether a mask has an element that is true."""
    if lines:
        answer = "a mask that has one" if has_elements else "masks that have none"
        warnings.warn(
            f"{module}: {named(lines)} asks whether an element of a mask is true, and the program is that of {answer}",
            SizesWarning,
            stacklevel=3,
        )


def _parameters(function: Any) -> list[inspect.Parameter]:
    """The positional parameters of a function or of a module."""
    called = getattr(function, "forward", function)
    try:
        found = inspect.signature(called).parameters.values()
    except (ValueError, TypeError):
        return []
    return [each for each in found if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]


def _required(function: Any) -> int:
    return len([each for each in _parameters(function) if each.default is each.empty])


def _names(module: Any, loss: Any, count: int, all_of_them: int) -> list[str]:
    """A name for each example: those of the parameters of the module, and of the loss."""
    found = [each.name for each in _parameters(module)][:count]
    found += [f"x{i}" for i in range(len(found), count)]
    found += [each.name for each in _parameters(loss)][1 : 1 + all_of_them - count]
    for i, name in enumerate(found):
        found[i] = name if name not in found[:i] else f"{name}_{i}"
    return found


def _dims(examples: Sequence[Any], names: Sequence[str], dynamic: Any) -> list[dict[int, str]]:
    """The dims of each example that are symbols."""
    if dynamic is None:
        return [_own_dims(x) for x in examples]
    if isinstance(dynamic, Mapping):
        if unknown := sorted(set(dynamic) - set(names)):
            raise ValueError(f"dynamic: there is no argument {unknown[0]!r}: they are {', '.join(names)}")
        return [dict(dynamic.get(name) or {}) for name in names]
    if len(dynamic) != len(examples):
        raise ValueError(
            f"dynamic has dims of {len(dynamic)} arguments, and there are {len(examples)} examples"
        )
    return [dict(each or {}) for each in dynamic]


def _own_dims(x: Any) -> dict[int, str]:
    if isinstance(x, TensorType):
        return {d: str(n) for d, n in enumerate(x.shape) if isinstance(n, Expression)}
    return {0: ROWS} if getattr(x, "ndim", 0) else {}


def _extents(whole: Any, examples: Sequence[Any], dims: Sequence[Mapping[int, str]]) -> dict[str, int]:
    """For each symbol a number of elements that no other dim has: PyTorch would take two equal ones for the same."""
    taken = {n for tensor in whole.state_dict().values() for n in tensor.shape}
    taken |= {n for x in examples for n in getattr(x, "shape", ()) if isinstance(n, int)}
    free = (n for n in count(3, 2) if n not in taken and _is_prime(n))
    return {name: next(free) for name in _symbols(dims)}


def _is_prime(odd: int) -> bool:
    return all(odd % k for k in range(3, odd, 2))


def _symbols(dims: Sequence[Mapping[int, str]]) -> Iterable[str]:
    """The symbols of all arguments, each once."""
    return dict.fromkeys(name for own in dims for name in own.values())


def _own_extents(examples: Sequence[Any], dims: Sequence[Mapping[int, str]]) -> dict[str, int]:
    """The numbers of elements that symbols have in examples that are tensors; without 1, which PyTorch takes for fixed."""
    found = dict[str, int]()
    for x, of_x in zip(examples, dims, strict=True):
        if not isinstance(x, TensorType):
            found |= {symbol: x.shape[d] for d, symbol in of_x.items() if x.shape[d] > 1}
    return found


def _given(
    torch: Any, examples: Sequence[Any], names: Sequence[str], dims: Any, extents: Mapping[str, int]
) -> tuple[Any, ...]:
    """The tensors to export with, one for each argument."""
    found = []
    for x, of_x, name in zip(examples, dims, names, strict=True):
        found.append(_example(torch, x, of_x, name, extents))
    return tuple(found)


def _example(torch: Any, x: Any, dims: Mapping[int, str], name: str, extents: Mapping[str, int]) -> Any:
    """A tensor of its own for an argument; dims with symbols have their number of elements."""
    if isinstance(x, TensorType):
        shape = list(x.shape)
        for d, symbol in dims.items():
            shape[d] = extents[symbol]
        array = np.zeros(shape, np.float32 if is_narrow(x.dtype) else x.dtype)
        made = torch.from_numpy(array)
        return made.to(getattr(torch, x.dtype.name)) if is_narrow(x.dtype) else made
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor or an ir.TensorType, got {type(x).__name__}")
    made = zeros(torch, x) if x.is_meta else x.detach()
    for d, symbol in dims.items():
        if not 0 <= d < x.ndim or not x.shape[d]:
            raise ValueError(f"dynamic: {name} of shape {list(x.shape)} has no dim {d} with elements")
        made = torch.cat([made] * (extents[symbol] // x.shape[d] + 1), d).narrow(d, 0, extents[symbol])
    return made.clone()


# -- the export --------------------------------------------------------------------------------------------------------


def _decided(
    torch: Any, module: Any, loss: Any, export: Callable[[], tuple[Any, dict[str, Any], dict[str, Bounds]]]
) -> tuple[tuple[Any, dict[str, Any], dict[str, Bounds]], list[str], bool]:
    """What ``export`` gives, the lines that ask whether a mask has an element that is true, and what they hear.

    They hear that it has one.  If the module raises an error then, they hear that there is none.
    """
    for has_elements in (True, False):
        with _for_the_export(torch, module, loss, has_elements) as asked:
            try:
                made = export()
            except UnsupportedError:
                if not (asked and has_elements):
                    raise
            else:
                return made, asked, has_elements
    raise AssertionError("one of the two returns, or raises")


@contextmanager
def _for_the_export(torch: Any, module: Any, loss: Any, has_elements: bool) -> Iterator[list[str]]:
    """The module in evaluation, its experts and its bags of rows in operators that can be written.

    Gives the lines that ask whether masks have elements.
    """
    with (
        _evaluated(module),
        _quiet(),
        without_checks_of_numbers(torch),
        dealt_experts(torch, module),
        bags_of_rows(torch),
        for_any_rows(torch),
        sizes_of_groups(torch),
        lengths_are_sizes(torch, module, loss),
        lines_of_the_loss(loss),
        decided_masks(torch, has_elements) as asked,
    ):
        yield asked


@contextmanager
def _evaluated(module: Any) -> Iterator[None]:
    """All modules in evaluation, and afterwards as they were."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is said about packages that the exporter would know, too."""
    logs = [logging.getLogger(name) for name in ("torch", "torch.onnx", "torch.export", "torch.fx")]
    before = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for log, level in zip(logs, before, strict=True):
            log.setLevel(level)


def _exported(
    torch: Any,
    whole: Any,
    examples: Sequence[Any],
    names: Sequence[str],
    dims: Any,
    extents: Mapping[str, int],
) -> tuple[Any, dict[str, Any], dict[str, Bounds]]:
    """The model as ONNX without its large tensors, all its tensors, which share memory with the module, and the bounds of
    symbols that the module sets bounds to."""

    def exported(symbols: Mapping[str, Any], extents: Mapping[str, int]) -> Any:
        given = _given(torch, examples, names, dims, extents)
        shapes = tuple({d: symbols[name] for d, name in own.items()} for own in dims)
        return torch.export.export(whole, given, dynamic_shapes=_as_taken(whole, shapes), strict=False), given

    lines = list[str]()
    try:
        with lines_that_fix_sizes(torch) as lines:
            (program, given), bounds = within_bounds(torch, extents, _own_extents(examples, dims), exported)
        detach_ungraded(torch, program.graph_module)
        program = program.run_decompositions(_decompositions(torch))
        _view_copies(torch, program.graph_module)
        made = torch.onnx.export(
            program,
            given,
            dynamo=True,
            optimize=False,
            verbose=False,
            opset_version=OPSET,
            input_names=list(names),
        )
    except Exception as error:  # the exporter raises many types
        raise refusal(error, type(whole).__name__, lines) from error
    graph = made.model.graph
    state = {
        **dict(whole.named_parameters(remove_duplicate=False)),
        **dict(whole.named_buffers(remove_duplicate=False)),
    }
    arrays = {}
    for name, value in list(graph.initializers.items()):
        held = state[name] if name in state else torch.from_numpy(np.array(value.const_value.numpy()))
        arrays[name] = _array(
            torch, torch.view_as_real(held) if held.is_complex() else held
        )  # as in the model
        if arrays[name].nbytes > LARGE:  # the model is written without its weights
            del graph.initializers[name]
            graph.inputs.append(value)
    proto = made.model_proto
    for value, own in zip(proto.graph.input, dims, strict=False):
        for d, name in own.items():
            value.type.tensor_type.shape.dim[d].dim_param = name
    return proto, arrays, bounds


def _decompositions(torch: Any) -> dict[Any, Callable[..., Any]]:
    """Operators of PyTorch whose meaning or gradient the exporter loses, in plain operators."""
    aten = torch.ops.aten
    return {
        aten.cross_entropy_loss.default: _cross_entropy,
        aten.embedding.default: _embedding,
        aten.split.Tensor: _split,
        aten.squeeze.dim: _squeeze,
        **attention(torch),
        **complex_numbers(torch),
        **corners(torch),
        **cumulative_products(torch),
        **masked_writes(torch),
        **means_of_all(torch),
        **of_any_sizes(torch),
        **places_in_order(torch),
        **sorted_rows(torch),
    }


def _view_copies(torch: Any, module: Any) -> None:
    """Views are taken of copies: PyTorch's exporter may lay an operand out in another order, of which there is no view."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.view.default:
            continue
        operand = node.args[0]
        with graph.inserting_before(node):
            by_rows = {"memory_format": torch.contiguous_format}
            copy = graph.call_function(torch.ops.aten.clone.default, (operand,), by_rows)
        copy.meta.update(operand.meta)
        node.replace_input_with(operand, copy)
    module.recompile()


def _split(x: Any, size: int, dim: int = 0) -> Any:
    """``torch.split`` of numbers in bfloat16, and of complex ones, in slices: ONNX has no sequences of them, which the
    exporter would write."""
    extent = x.shape[dim]
    has_sequences = x.dtype != _torch().bfloat16 and not x.is_complex()
    if has_sequences or not isinstance(extent, int):
        return NotImplemented
    return [x.narrow(dim, first, min(size, extent - first)) for first in range(0, extent, size)]


def _squeeze(x: Any, dim: int) -> Any:
    """``x.squeeze(dim)`` of a dim that has several elements, which stays; the exporter would write that it goes."""
    extent = x.shape[dim] if x.dim() else 1
    return x.view_as(x) if isinstance(extent, int) and extent != 1 else NotImplemented


def _embedding(
    table: Any, indices: Any, padding: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    return embedding(_torch(), table, indices, padding, scale_grad_by_freq)


def _cross_entropy(
    scores: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """``F.cross_entropy`` in plain operators: the exporter to ONNX leaves label smoothing out.

    ``scores`` has the classes in dim 1, or in its only dim.  ``reduction`` is 0 for none, 1 for the mean, 2 for the sum.
    """
    torch = _torch()
    dim = 1 if scores.dim() > 1 else 0
    logs = torch.log_softmax(scores, dim)
    classes = scores.shape[dim]
    shape = vector_shape(scores.dim(), dim, classes)
    weights = None if weight is None else weight.reshape(shape)
    if target.is_floating_point():  # probabilities of the classes
        target = target * (1 - label_smoothing) + label_smoothing / classes
        each = -(target * logs if weights is None else target * logs * weights).sum(dim)
        rows = each.numel()
        return [each, each.sum() / rows, each.sum()][reduction]
    counts = target != ignore_index
    chosen = torch.where(counts, target, 0).unsqueeze(dim)
    of_class = torch.gather(logs, dim, chosen).squeeze(dim)
    share = counts.to(logs.dtype)
    if weight is not None:
        share = share * weight[chosen.squeeze(dim)]
    each = -of_class * share
    total = each.sum()
    if label_smoothing:
        even = -(logs if weights is None else logs * weights).sum(dim) * counts.to(logs.dtype)
        each = each * (1 - label_smoothing) + even * (label_smoothing / classes)
        total = each.sum()
    return [each, total / share.sum(), total][reduction]


def _as_taken(module: Any, shapes: tuple[Any, ...]) -> Any:
    """The dims of arguments as ``torch.export`` takes them: those of ``*given`` are together."""
    first = next(iter(inspect.signature(module.forward).parameters.values()))
    return {first.name: shapes} if first.kind is first.VAR_POSITIONAL else shapes


def _array(torch: Any, tensor: Any) -> np.ndarray[Any, Any]:
    """A tensor as an array, which shares its memory where it lies on the host."""
    tensor = tensor.detach().cpu()
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        words = torch.uint8 if tensor.itemsize == 1 else torch.uint16
        return np.asarray(tensor.contiguous().view(words).numpy()).view(as_dtype(name))
    return np.asarray(tensor.numpy())
