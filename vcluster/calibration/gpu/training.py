"""Three small Transformers: what a step of them takes by PyTorch, and what the simulator predicts of it.

Nothing is fitted to these steps.  Weights are in bfloat16, with main weights, gradients and AdamW in float32: what
``--bf16`` means to the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from parallelism.display import in_columns
from parallelism.display.quantities import seconds as shown_seconds
from parallelism.hardware import Hardware
from parallelism.training import MegatronFlags, TrainingRun, figures
from vcluster.calibration.gpu.layers import Model, Sizes, backend_chosen, loss, made_weights, rotary_tables
from vcluster.calibration.gpu.timing import Clock

MODELS = (
    Model("GPT, 12 of 768", Sizes("gpt", 768, 12, 12, 3072), 12, 50304, 1024, 8),
    Model("Llama, 8 of 2048", Sizes("llama", 2048, 16, 16, 5632), 8, 32000, 2048, 2, 2),
    Model("Llama, 4 of 4096", Sizes("llama", 4096, 32, 8, 14336), 4, 32000, 4096, 1),
)
QUICK_MODELS = (
    Model("GPT, 2 of 64", Sizes("gpt", 64, 4, 4, 256), 2, 512, 64, 2),
    Model("Llama, 2 of 64", Sizes("llama", 64, 4, 2, 192), 2, 512, 32, 1, 2),
    Model("Llama, 1 of 128", Sizes("llama", 128, 4, 4, 256), 1, 256, 48, 2),
)


@dataclass(frozen=True)
class HeldOut:
    """A step that was measured, and its prediction by constants that were not fitted to it."""

    name: str
    measured: float
    predicted: float
    flops: float
    """Those of the model in a step, as MFU counts them."""
    peak: float
    """The flops per second of the device in the dtype of the products."""

    @property
    def mfu(self) -> float:
        """The measured model flops utilization."""
        return self.flops / self.measured / self.peak


def run_of(model: Model) -> TrainingRun:
    """The step as the simulator has it, on one device."""
    sizes, gpt = model.sizes, model.sizes.is_gpt
    return MegatronFlags(
        num_layers=model.layers, hidden_size=sizes.width, ffn_hidden_size=sizes.feed_forward,
        num_attention_heads=sizes.heads, seq_length=model.tokens, vocab_size=model.vocabulary,
        group_query_attention=sizes.key_value_heads != sizes.heads or None,
        num_query_groups=sizes.key_value_heads if sizes.key_value_heads != sizes.heads else None,
        swiglu=not gpt or None, normalization=None if gpt else "RMSNorm",
        position_embedding_type=None if gpt else "rope",
        untie_embeddings_and_output_weights=not gpt or None, disable_bias_linear=not gpt or None,
        use_flash_attn=True, attention_dropout=0.0, hidden_dropout=0.0, bf16=True,
        micro_batch_size=model.microbatch, global_batch_size=model.microbatch * model.microbatches).run(1)


def predicted(model: Model, hardware: Hardware, measured: float) -> HeldOut:
    """The prediction of a step beside what it took."""
    run = run_of(model)
    told = figures(run, hardware.placed([0]))
    peak = hardware.peak(run.dtype)
    return HeldOut(model.name, measured, told.seconds, told.mfu * told.seconds * peak, peak)


def measured_step(clock: Clock, model: Model, steps: int, backend: str = "any") -> dict[str, float]:
    """The seconds of a step of training: the median of the last half, by the clock of the host.

    On a GPU there are as many steps as take ``steps`` times 0.2 s, and at least ``steps``.

    ``device_seconds`` are those of its kernels alone, issued before they began.
    """
    step = _step_of(clock, model)
    with backend_chosen(clock.torch, backend):
        for _ in range(3):
            first = float(step())
        clock.synchronize()
        found: list[float] = []
        while len(found) < steps or (clock.on_gpu and sum(found) < 0.2 * steps):
            began = perf_counter()
            last = step()
            clock.synchronize()
            found.append(perf_counter() - began)
        row = {"seconds": median(found[len(found) // 2:]), "steps": len(found), "first_loss": first,
               "last_loss": float(last)}
        if clock.on_gpu:
            timed = clock.time(step, cold=False, least=4, most=8)
            row |= {"device_seconds": timed.seconds, "issue_seconds": timed.issue_seconds}
    return row


def _step_of(clock: Clock, model: Model) -> Any:
    """A function that does a step of training and gives its loss, an array of one number."""
    torch, device, sizes = clock.torch, clock.device, model.sizes
    weights = made_weights(torch, model.shapes(), device, torch.bfloat16)
    main = [weight.detach().float() for weight in weights.values()]
    for weight in main:
        weight.grad = torch.zeros_like(weight)
    gradients = [weight.grad for weight in main]
    optimizer = torch.optim.AdamW(main, lr=1e-4, fused=True)
    shape = (model.microbatches, model.microbatch, model.tokens)
    tokens = torch.randint(model.vocabulary, shape, device=device)
    targets = tokens.roll(-1, dims=-1).contiguous()
    tables = None if sizes.is_gpt else rotary_tables(torch, model.tokens, sizes.head_width, device, torch.bfloat16)
    held = list(weights.values())

    def step() -> Any:
        torch._foreach_zero_(gradients)
        for number in range(model.microbatches):
            value = loss(torch, model, weights, tokens[number], targets[number], tables)
            torch._foreach_add_(gradients, torch.autograd.grad(value / model.microbatches, held))
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(held, main)
        return value.detach()

    return step


def table(rows: list[HeldOut]) -> str:
    """Predicted beside measured, and what one constant utilization would say: the median of these very steps."""
    if not rows:
        return "no step was measured"
    usual = median(row.mfu for row in rows)
    cells = [("step of", "measured", "predicted", "error", "", "constant MFU", "error")]
    errors, of_constant = [], []
    for row in rows:
        constant = row.flops / (usual * row.peak)
        errors.append(row.predicted / row.measured - 1)
        of_constant.append(constant / row.measured - 1)
        cells.append((row.name, shown_seconds(row.measured), shown_seconds(row.predicted), f"{errors[-1]:+.1%}",
                      "held out", shown_seconds(constant), f"{of_constant[-1]:+.1%}"))
    means = [sum(map(abs, each)) / len(rows) for each in (errors, of_constant)]
    return "\n".join([
        *in_columns(cells, 2),
        f"mean error {means[0]:.1%} held out; of one constant MFU {means[1]:.1%}. The constant is {usual:.1%}, the "
        "median of", "these very steps, which favours it; the prediction has seen none of them."])
