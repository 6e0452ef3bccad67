"""Small models of PyTorch with their losses, for tests of `from_torch`.

    python tests/support/torch_models.py FILE.onnx      writes one as both exporters write it, for tests without torch
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, time, width = x.shape
        parts = self.qkv(self.ln1(x)).split(width, dim=2)
        q, k, v = (each.view(rows, time, self.heads, width // self.heads).transpose(1, 2) for each in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, time, width)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    """As GPT-2, with its tied embedding."""

    def __init__(self, vocabulary: int, time: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(time, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


class Experts(nn.Module):
    """Two of four experts for each row, of which all are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 12, 20) / 4), nn.Parameter(torch.randn(4, 20, 12) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chances = F.softmax(self.gate(x), -1)
        best, places = chances.topk(2, -1)
        gates = torch.zeros_like(chances).scatter(-1, places, best)
        hidden = F.silu(torch.matmul(x, self.up))
        return (torch.matmul(hidden, self.down) * gates.T[:, :, None]).sum(0)


class LoopedExperts(nn.Module):
    """A layer that goes over the experts that were hit, with the attributes that those of transformers have."""

    def __init__(self, width: int, hidden: int, count: int, *, is_transposed: bool, has_bias: bool, has_gate: bool) -> None:
        super().__init__()
        self.is_transposed, self.has_bias, self.has_gate = is_transposed, has_bias, has_gate
        self.has_post_expert_norm = self._is_expert_parallel = False
        self.act_fn = F.silu
        self.up_name = "gate_up_proj" if has_gate else "up_proj"
        for name, shape in ((self.up_name, (width, hidden * (1 + has_gate))), ("down_proj", (hidden, width))):
            weight = torch.randn(count, *shape) / 4
            setattr(self, name, nn.Parameter(weight if is_transposed else weight.transpose(1, 2).contiguous()))
            if has_bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(count, shape[1]) / 4))

    def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def product(self, x: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        weight = getattr(self, name)[expert]
        made = x @ (weight if self.is_transposed else weight.T)
        return made + getattr(self, f"{name}_bias")[expert] if self.has_bias else made

    def forward(self, x: torch.Tensor, experts: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros_like(x)
        for expert in experts.unique().tolist():
            tokens, choices = torch.where(experts == expert)
            hidden = self.product(x[tokens], self.up_name, expert)
            hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
            made = self.product(hidden, "down_proj", expert) * gates[tokens, choices, None]
            sums = sums.index_add(0, tokens, made)
        return sums


class Mixture(nn.Module):
    """Blocks of experts behind a router, as models of transformers have them."""

    def __init__(self, blocks: int, width: int = 12, hidden: int = 8, count: int = 4, **how: bool) -> None:
        super().__init__()
        self.routers = nn.ModuleList([nn.Linear(width, count, bias=False) for _ in range(blocks)])
        self.experts = nn.ModuleList([LoopedExperts(width, hidden, count, **how) for _ in range(blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for router, experts in zip(self.routers, self.experts, strict=True):
            tokens = x.view(-1, x.shape[-1])
            gates, chosen = router(tokens).softmax(-1).topk(2, -1)
            x = x + experts(tokens, chosen, gates / gates.sum(-1, keepdim=True)).view(x.shape)
        return x


class LookingExperts(nn.Module):
    """As Mistral's own code has them: each expert looks up the rows that chose it, and adds what it makes of them."""

    def __init__(self, width: int = 12, hidden: int = 8, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList([
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.view(-1, x.shape[-1])
        gates, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        sums = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            rows, choices = torch.where(chosen == i)
            sums[rows] += gates[rows, choices, None] * expert(tokens[rows])
        return x + sums.view(x.shape)


class SortingExperts(nn.Module):
    """As torchtitan has them: rows are sorted by expert, multiplied in groups, and added to their tokens."""

    def __init__(self, width: int = 12, hidden: int = 8, count: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.router, self.chosen = nn.Linear(width, count, bias=False), chosen
        self.up = nn.Parameter(torch.randn(count, hidden, width) / 3)
        self.down = nn.Parameter(torch.randn(count, width, hidden) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.view(-1, x.shape[-1])
        gates, experts = self.router(tokens).softmax(-1).topk(self.chosen, -1)
        count = len(self.up)
        sizes = torch.histc(experts.view(-1).float(), bins=count, min=0, max=count)
        order = torch.argsort(experts.view(-1), stable=True)
        places = (order // self.chosen).reshape(-1, 1).expand(-1, tokens.shape[1])
        rows = torch.gather(tokens, 0, places) * gates.view(-1)[order].reshape(-1, 1)
        ends = torch.cumsum(sizes, 0, dtype=torch.int32)
        hidden = F.silu(torch._grouped_mm(rows, self.up.transpose(-2, -1), offs=ends))
        made = torch._grouped_mm(hidden, self.down.transpose(-2, -1), offs=ends)
        return x + torch.zeros_like(tokens).scatter_add(0, places, made).view(x.shape)


class Biased(nn.Module):
    """As encoders are written: types of tokens out of a buffer, and scores with a bias by the distance, which is a weight."""

    def __init__(self, words: int = 31, length: int = 16, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.words, self.types, self.out = nn.Embedding(words, width), nn.Embedding(2, width), nn.Linear(width, words)
        self.query, self.key, self.value, self.back = (nn.Linear(width, width) for _ in range(4))
        self.distances, self.heads = nn.Embedding(2 * length - 1, heads), heads
        self.register_buffer("of_types", torch.zeros(1, length, dtype=torch.int64), persistent=False)
        self.register_buffer("places", torch.arange(length)[None], persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows, length = ids.shape
        places = self.places[:, :length].expand(rows, -1)
        x = self.words(ids) + self.types(torch.gather(self.of_types.expand(rows, -1), 1, places).expand(rows, length))
        q, k, v = (each(x).view(rows, length, self.heads, -1).transpose(1, 2) for each in (self.query, self.key, self.value))
        apart = torch.arange(length)[:, None] - torch.arange(length)[None, :] + self.places.shape[1] - 1
        bias = self.distances(apart).permute(2, 0, 1)[None].expand(rows, -1, -1, -1).contiguous()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(rows, length, -1)
        return self.out(x + self.back(y))


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 10, 2, batch_first=True, bidirectional=True), nn.Linear(20, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0][:, -1])


class Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.GroupNorm(4, before), nn.GroupNorm(4, after)
        self.c1, self.c2 = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.same, self.of_time = nn.Conv2d(before, after, 1), nn.Linear(16, after)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.c1(F.silu(self.n1(x))) + self.of_time(time)[:, :, None, None]
        return self.same(x) + self.c2(F.silu(self.n2(hidden)))


class UNet(nn.Module):
    """A network that takes noise out of images, with the time of the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.down, self.up = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ConvTranspose2d(16, 8, 4, 2, 1)
        self.a, self.b, self.c = Residual(8, 8), Residual(16, 16), Residual(16, 8)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        angles = time[:, None] * torch.exp(-math.log(1e4) * torch.arange(8) / 8)
        time = torch.cat([angles.sin(), angles.cos()], -1)
        wide = self.a(self.first(x), time)
        deep = self.b(self.down(wide), time)
        return self.last(self.c(torch.cat([wide, self.up(deep)], 1), time))


class ViT(nn.Module):
    def __init__(
        self, width: int = 24, layers: int = 3, size: int = 16, patch: int = 4, classes: int = 10, heads: int = 4,
        inner: int = 48,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) / 9)
        layer = nn.TransformerEncoderLayer(width, heads, inner, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.encoder(x)[:, 0])


class Speech(nn.Module):
    """As Whisper: convolutions over time, an encoder, and a decoder with a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv1d(10, 16, 3, padding=1), nn.Conv1d(16, 16, 3, stride=2, padding=1)
        self.words, self.places = nn.Embedding(50, 16), nn.Parameter(torch.randn(7, 16) / 9)
        options: dict[str, Any] = {"dim_feedforward": 32, "batch_first": True, "norm_first": True, "activation": "gelu"}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, **options), 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, **options), 2)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(7))

    def forward(self, sound: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        heard = self.encoder(F.gelu(self.c2(F.gelu(self.c1(sound)))).transpose(1, 2))
        said = self.words(ids) + self.places
        return self.decoder(said, heard, tgt_mask=self.mask, tgt_is_causal=True) @ self.words.weight.T


class Llama(nn.Module):
    """Root mean square norms, rotary positions, and groups of heads that share keys."""

    def __init__(self, width: int = 32, heads: int = 4, groups: int = 2, layers: int = 2, vocabulary: int = 61) -> None:
        super().__init__()
        self.heads, self.groups, each = heads, groups, width // heads
        self.words = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            sizes = {"q": width, "k": each * groups, "v": each * groups, "o": width, "gate": 64, "up": 64}
            made: dict[str, nn.Module] = {name: nn.Linear(width, n, bias=False) for name, n in sizes.items()}
            made |= {"down": nn.Linear(64, width, bias=False), "n1": nn.RMSNorm(width), "n2": nn.RMSNorm(width)}
            self.layers.append(nn.ModuleDict(made))
        self.norm, self.out = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        angles = torch.outer(torch.arange(8), 1e4 ** (-torch.arange(0, each, 2) / each))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        rows, time, width = x.shape
        for layer in self.layers:
            y = layer["n1"](x)
            q, k, v = (layer[n](y).view(rows, time, -1, width // self.heads).transpose(1, 2) for n in "qkv")
            k, v = (each.repeat_interleave(self.heads // self.groups, 1) for each in (self.rotated(k), v))
            mixed = F.scaled_dot_product_attention(self.rotated(q), k, v, is_causal=True)
            x = x + layer["o"](mixed.transpose(1, 2).reshape(rows, time, width))
            y = layer["n2"](x)
            x = x + layer["down"](F.silu(layer["gate"](y)) * layer["up"](y))
        return self.out(self.norm(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.b1, self.pool = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.MaxPool2d(3, 2, 1)
        self.c2, self.b2, self.out = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.b1(self.c1(x))))
        return self.out(F.adaptive_avg_pool2d(F.relu(x + self.b2(self.c2(x))), 1).flatten(1))


def of_tokens(scores: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), **options)


def some(most: int, *shape: int, ignored: bool = False) -> torch.Tensor:
    found = torch.randint(0, most, shape)
    if ignored:
        found[0, 0] = found[-1, 1] = -100
    return found


def _log_likelihood(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(F.log_softmax(scores, -1), targets)


def _smoothed(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return of_tokens(scores, targets, label_smoothing=0.1)


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False)


Made = tuple[nn.Module, tuple[torch.Tensor, ...], Callable[..., Any] | None]
MODELS: dict[str, Callable[[], Made]] = {
    "a tied GPT, some targets ignored": lambda: (
        GPT(61, 8, 16, 2, 2), (some(61, 4, 8), some(61, 4, 8, ignored=True)), of_tokens),
    "label smoothing, some targets ignored": lambda: (
        GPT(53, 6, 12, 3, 1), (some(53, 4, 6), some(53, 4, 6, ignored=True)), _smoothed),
    "a perceptron with a loss that is a module": lambda: (
        nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), (torch.randn(4, 5), some(3, 4)),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))),
    "experts": lambda: (Experts(), (torch.randn(6, 12), torch.randn(6, 12)), F.mse_loss),
    "experts that are looped over": lambda: (
        Mixture(2, is_transposed=False, has_bias=False, has_gate=True), (torch.randn(4, 6, 12), torch.randn(4, 6, 12)),
        F.mse_loss),
    "experts with biases": lambda: (
        Mixture(1, is_transposed=True, has_bias=True, has_gate=False), (torch.randn(4, 6, 12), torch.randn(4, 6, 12)),
        F.mse_loss),
    "experts that look up their tokens": lambda: (
        nn.Sequential(LookingExperts(), LookingExperts()), (torch.randn(4, 6, 12), torch.randn(4, 6, 12)), F.mse_loss),
    "experts that sort their tokens": lambda: (
        nn.Sequential(SortingExperts(), SortingExperts()), (torch.randn(4, 6, 12), torch.randn(4, 6, 12)), F.mse_loss),
    "an LSTM in both directions": lambda: (LSTM(), (torch.randn(4, 7, 6), some(5, 4)), F.cross_entropy),
    "a diffusion U-Net": lambda: (UNet(), (torch.randn(4, 3, 8, 8), torch.rand(4), torch.randn(4, 3, 8, 8)), F.mse_loss),
    "speech with a decoder": lambda: (
        Speech(), (torch.randn(4, 10, 12), some(50, 4, 7), some(50, 4, 7, ignored=True)), of_tokens),
    "a vision transformer": lambda: (ViT(), (torch.randn(4, 3, 16, 16), some(10, 4)), F.cross_entropy),
    "a Llama": lambda: (Llama(), (some(61, 4, 8), some(61, 4, 8)), of_tokens),
    "a residual network": lambda: (ResNet(), (torch.randn(4, 3, 16, 16), some(6, 4)), F.cross_entropy),
    "nn.TransformerEncoder": lambda: (_encoder(), (torch.randn(4, 5, 16),), lambda y: (y**2).mean()),
    "a GRU": lambda: (nn.GRU(6, 8, batch_first=True), (torch.randn(4, 5, 6),), lambda y: y[0].square().mean()),
    "chances of two classes": lambda: (
        nn.Sequential(nn.Linear(5, 1)), (torch.randn(4, 5), torch.rand(4, 1)), F.binary_cross_entropy_with_logits),
    "chances as targets": lambda: (
        nn.Sequential(nn.Linear(5, 3)), (torch.randn(4, 5), torch.softmax(torch.randn(4, 3), 1)), F.cross_entropy),
    "a negative log likelihood": lambda: (
        nn.Sequential(nn.Embedding(11, 6), nn.Flatten(), nn.LayerNorm(24), nn.Linear(24, 2)), (some(11, 4, 4), some(2, 4)),
        _log_likelihood),
    "an encoder with biased scores": lambda: (Biased(), (some(31, 4, 8), some(31, 4, 8, ignored=True)), of_tokens),
    "a loss of places": lambda: (nn.Conv2d(3, 5, 3), (torch.randn(4, 3, 6, 7), some(5, 4, 4, 5)), F.cross_entropy),
}


class Loss(nn.Module):
    """The loss behind a module, as an exporter takes it."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any], own: int) -> None:
        super().__init__()
        self.model, self.loss, self.own = model, loss, own

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model(*given[:self.own]), *given[self.own:])


def with_different_weights(module: nn.Module) -> nn.Module:
    """The module in evaluation, without two weights that are equal: the older exporter takes such for one."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) / 20)
    return module.eval()


def loss_and_gradients(module: nn.Module, loss: Callable[..., Any], examples: tuple[torch.Tensor, ...], own: int) -> Any:
    """What PyTorch finds: the loss, and the gradients by the name of the parameter."""
    module.zero_grad()
    function = loss.forward if isinstance(loss, nn.Module) else loss
    value = function(module(*examples[:own]), *examples[own:])
    value.backward()
    return value.item(), {name: x.grad.numpy() for name, x in module.named_parameters() if x.grad is not None}


if __name__ == "__main__":
    import sys

    torch.manual_seed(5)
    made = Loss(GPT(23, 6, 8, 2, 2), of_tokens, 1).eval()
    inputs = (some(23, 3, 6), some(23, 3, 6))
    print([x.tolist() for x in inputs], made(*inputs).item())
    name = sys.argv[1]
    dims = torch.export.Dim("B")
    torch.onnx.export(made, inputs, name, dynamo=True, dynamic_shapes=({0: dims}, {0: dims}), external_data=False)
    torch.onnx.export(made, inputs, name.replace(".onnx", "_torchscript.onnx"), dynamo=False, opset_version=17,
                      input_names=["ids", "targets"], dynamic_axes={"ids": {0: "B"}, "targets": {0: "B"}})
