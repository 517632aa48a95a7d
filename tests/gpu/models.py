"""What is trained: small ones of five kinds for correctness, GPT-2 for speed. Nothing is downloaded."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_spmd.examples.gpt_bytes import GPT, Block, GPTBytes
from tests.gpu.child import NotRun
from tests.helpers.modules import LlamaBlock

VOCABULARY, CLASSES = 256, 10


class Trained(L.LightningModule):
    """A network that gives its loss for a batch, with AdamW.

    Args:
        network: called with the batch.
        optimizer: makes it of the parameters.
    """

    def __init__(self, network: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.network = network
        self.make_optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("evaluated", self.network(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


class ByLogits(nn.Module):
    """Cross-entropy of what ``network`` says of the first of two tensors, with the second one as targets."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(self.network(batch[0]).flatten(0, -2), batch[1].flatten())


# ---------------------------------------------------------------------- small ones
class Llama(nn.Module):
    """Grouped queries, rotary positions, RMS norms, gated MLPs."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*[LlamaBlock(width, 4, 2) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens))))


class ViT(nn.Module):
    """Patches by a convolution, a class token, torch's own encoder layers."""

    def __init__(self, width: int, layers: int, size: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // 4) ** 2 + 1, width))
        layer = functools.partial(nn.TransformerEncoderLayer, width, 4, 2 * width, 0.1, batch_first=True)
        self.blocks = nn.Sequential(*[layer(activation="gelu", norm_first=True) for _ in range(layers)])
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.blocks(x)[:, 0])


class _BiasedAttention(nn.Module):
    """T5's: no scaling, a learned bias by distance (in one direction for the decoder)."""

    def __init__(self, width: int, heads: int, *, causal: bool = False, biased: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.bias = nn.Embedding(32, heads) if biased else None

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (
            layer(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, t in ((self.q, x), (self.k, seen), (self.v, seen))
        )
        scores = q @ k.transpose(-1, -2)
        rows, columns = torch.arange(x.shape[1], device=x.device), torch.arange(seen.shape[1], device=x.device)
        distance = columns[None, :] - rows[:, None]
        if self.bias is not None:
            scores = scores + self.bias((distance + 16).clamp(0, 31)).permute(2, 0, 1)
        if self.causal:
            scores = scores.masked_fill(distance > 0, torch.finfo(scores.dtype).min)
        mixed = (scores.float().softmax(-1).type_as(scores) @ v).transpose(1, 2).flatten(2)
        return self.o(mixed)


class _T5Layer(nn.Module):
    def __init__(self, width: int, *, decoder: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3 if decoder else 2))
        self.attention = _BiasedAttention(width, 4, causal=decoder, biased=True)
        self.cross = _BiasedAttention(width, 4) if decoder else None
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width, bias=False), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        h = self.norms[0](x)
        x = x + self.attention(h, h)
        if self.cross is not None and seen is not None:
            x = x + self.cross(self.norms[2](x), seen)
        return x + self.mlp(self.norms[1](x))


class T5(nn.Module):
    """An encoder and a decoder over one vocabulary; the head is the embedding table."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.ModuleList(_T5Layer(width, decoder=False) for _ in range(layers))
        self.decoder = nn.ModuleList(_T5Layer(width, decoder=True) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        seen, x = self.tokens(tokens), self.tokens(tokens.roll(1, 1))
        for layer in self.encoder:
            seen = layer(seen)
        seen = self.norms[0](seen)
        for layer in self.decoder:
            x = layer(x, seen)
        return self.norms[1](x) @ self.tokens.weight.T / x.shape[-1] ** 0.5


class ConvNet(nn.Module):
    """Two residual stages with batch norm, strides and a pooled head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.stages = nn.ModuleList(self._stage(width) for _ in range(2))
        self.down = nn.MaxPool2d(2)
        self.head = nn.Linear(width, CLASSES)

    @staticmethod
    def _stage(width: int) -> nn.Module:
        conv = functools.partial(nn.Conv2d, width, width, 3, padding=1, bias=False)
        return nn.Sequential(conv(), nn.BatchNorm2d(width), nn.ReLU(inplace=True), conv(), nn.BatchNorm2d(width))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for stage in self.stages:
            x = self.down(F.relu(x + stage(x)))
        return self.head(x.mean((2, 3)))


class _ByTransformers(nn.Module):
    """A model of Hugging Face's library, which computes the loss itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss


def _transformers_t5(*, toy: bool) -> nn.Module:
    if importlib.util.find_spec("transformers") is None:
        raise NotRun("transformers is not installed")
    from tests.helpers import zoo

    return _ByTransformers(zoo.build("t5", 2)[0])


def network(name: str, *, toy: bool) -> nn.Module:
    """The small model of that name; the wide ones are such that GPUs take their usual kernels."""
    width, layers = (32, 1) if toy else (256, 4)
    if name == "gpt":
        return ByLogits(GPT(width, layers, 4, 128, 0.1, tie_embeddings=True))
    if name == "llama":
        return ByLogits(Llama(width, layers))
    if name == "vit":
        return ByLogits(ViT(width, layers, 16 if toy else 32))
    if name == "t5":
        return ByLogits(T5(width, layers))
    if name == "conv":
        return ByLogits(ConvNet(8 if toy else 64))
    return _transformers_t5(toy=toy)


def samples(name: str, count: int, *, toy: bool) -> list[Any]:
    """Samples for the small model of that name."""
    generator = torch.Generator().manual_seed(1)
    if name in ("vit", "conv"):
        size = 16 if toy else 32
        images = torch.randn(count, 3, size, size, generator=generator)
        return list(zip(images, torch.randint(0, CLASSES, (count,), generator=generator), strict=True))
    if name == "transformers_t5":
        ids = torch.randint(5, 128, (count, 16), generator=generator)
        return [{"input_ids": row, "labels": row} for row in ids]
    text = torch.randint(0, VOCABULARY, (count, (16 if toy else 128) + 1), generator=generator)
    return list(zip(text[:, :-1], text[:, 1:], strict=True))


def main_job(*, toy: bool) -> tuple[L.LightningModule, list[Any]]:
    """The README's byte-level GPT with its own optimizer and schedule, and windows of a made text."""
    sizes = {"width": 32, "layers": 1, "sequence_length": 16} if toy else {}
    module = GPTBytes(**sizes)  # type: ignore[arg-type]
    text = torch.randint(32, 127, (512, module.sequence_length + 1), generator=torch.Generator().manual_seed(1))
    return module, [{"inputs": row[:-1], "targets": row[1:]} for row in text]


# ---------------------------------------------------------------------- GPT-2
@dataclass(frozen=True)
class Case:
    """A benchmark.

    Args:
        layers, width, heads: of a GPT-2.
        rows, length: of a batch.
        vocabulary: number of tokens, a multiple of 128 as in everybody's GPT-2.
        steps, warmup: of a turn.
    """

    layers: int
    width: int
    heads: int
    rows: int
    length: int = 1024
    vocabulary: int = 50304
    steps: int = 24
    warmup: int = 10

    @property
    def tokens(self) -> int:
        """Of a batch."""
        return self.rows * self.length


CASES = {
    "small": Case(12, 256, 4, rows=1, length=128, vocabulary=4096, steps=100, warmup=20),
    "gpt2_124m": Case(12, 768, 12, rows=16),
    "gpt2_350m": Case(24, 1024, 16, rows=8),
}
TOYS = {
    "small": Case(2, 32, 2, rows=1, length=16, vocabulary=128, steps=4, warmup=4),
    "gpt2_124m": Case(2, 64, 2, rows=2, length=32, vocabulary=256, steps=3, warmup=4),
    "gpt2_350m": Case(3, 64, 2, rows=2, length=32, vocabulary=256, steps=3, warmup=4),
}


class GPT2(nn.Module):
    """GPT-2: tokens → logits, the head tied to the embedding; attention by ``scaled_dot_product_attention``."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(case.vocabulary, case.width), nn.Embedding(case.length, case.width)
        self.blocks = nn.Sequential(*[Block(case.width, case.heads, 0.0) for _ in range(case.layers)])
        self.norm, self.head = nn.LayerNorm(case.width), nn.Linear(case.width, case.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])))


def flops_per_token(network: GPT2, case: Case) -> float:
    """Of a training step: 6 a parameter that takes part in products, 12 a layer, feature and position for attention.

    The convention of PaLM and nanoGPT: attention counts whole though it is causal, recomputation not at all.
    """
    parameters = sum(p.numel() for p in network.parameters()) - network.positions.weight.numel()
    return 6 * parameters + 12 * case.layers * case.width * case.length


class Repeated(torch.utils.data.Dataset[Any]):
    """As many batches as asked for, of a few that were made beforehand, in memory from which a GPU can copy."""

    def __init__(self, case: Case, count: int, device: str) -> None:
        generator = torch.Generator().manual_seed(2)
        text = torch.randint(0, case.vocabulary, (4, case.rows, case.length + 1), generator=generator)
        self.batches = [[rows[:, :-1].contiguous(), rows[:, 1:].contiguous()] for rows in text]
        if device == "cuda":
            self.batches = [[t.pin_memory() for t in batch] for batch in self.batches]
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> list[Tensor]:
        return self.batches[index % len(self.batches)]


def loader(case: Case, count: int, device: str) -> DataLoader[Any]:
    """Batches as they are; no workers."""
    return DataLoader(Repeated(case, count, device), batch_size=None)
