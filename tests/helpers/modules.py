"""Small LightningModules that have what real ones have: dropout, batch norm, torchmetrics, every way of logging."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH, CLASSES = 48, 12, 5
IGNORED = -100


class Lion(torch.optim.Optimizer):
    """An optimizer as third parties write them: a step count in Python, ``math.sqrt``, ``p.data``."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.1
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"], state["step"] = torch.zeros_like(p), 0
                state["step"] += 1
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"].clone().mul_(first).add(p.grad, alpha=1 - first).tanh_()
                p.add_(update, alpha=-group["lr"] * math.sqrt(1 - second ** state["step"]))
                state["exp_avg"].mul_(second).add_(p.grad, alpha=1 - second)
        return loss


O = torch.optim  # noqa: E741
# name: (class, arguments). The four of the acceptance list come first.
OPTIMIZERS: dict[str, tuple[type[O.Optimizer], dict[str, Any]]] = {
    "sgd": (O.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adamw": (O.AdamW, {"lr": 1e-3}),
    "adamw_fused": (O.AdamW, {"lr": 1e-3, "fused": True}),
    "rmsprop": (O.RMSprop, {"lr": 1e-3}),
    "sgd_plain": (O.SGD, {"lr": 0.05}),
    "sgd_dampening": (O.SGD, {"lr": 0.02, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "sgd_maximize": (O.SGD, {"lr": 1e-3, "momentum": 0.9, "maximize": True}),
    "sgd_foreach": (O.SGD, {"lr": 0.02, "momentum": 0.9, "foreach": True}),
    "sgd_fused": (O.SGD, {"lr": 0.02, "momentum": 0.9, "fused": True}),
    "adam": (O.Adam, {"lr": 1e-3, "weight_decay": 0.1}),
    "adam_foreach": (O.Adam, {"lr": 1e-3, "foreach": True}),
    "adam_amsgrad": (O.Adam, {"lr": 1e-3, "amsgrad": True, "maximize": True}),
    "adamw_amsgrad_foreach": (O.AdamW, {"lr": 1e-3, "amsgrad": True, "foreach": True}),
    "adamw_amsgrad_fused": (O.AdamW, {"lr": 1e-3, "amsgrad": True, "fused": True}),
    "adamw_loop": (O.AdamW, {"lr": 1e-3, "foreach": False}),
    "adamw_tensor_lr": (O.AdamW, {"lr": torch.tensor(1e-3), "fused": True}),
    "rmsprop_centered": (O.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.9}),
    "adagrad": (O.Adagrad, {"lr": 0.01, "lr_decay": 0.01}),
    "adagrad_fused": (O.Adagrad, {"lr": 0.01, "fused": True}),
    "adadelta": (O.Adadelta, {"lr": 1.0}),
    "nadam": (O.NAdam, {"lr": 1e-3}),
    "nadam_decoupled": (O.NAdam, {"lr": 1e-3, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": (O.RAdam, {"lr": 1e-3}),
    "adamax": (O.Adamax, {"lr": 1e-3}),
    "asgd": (O.ASGD, {"lr": 0.01}),
    "rprop": (O.Rprop, {"lr": 1e-3}),
    "lion": (Lion, {"lr": 1e-3}),
}


def build_optimizer(name: str, parameters: Iterable[Any], **changes: Any) -> O.Optimizer:
    """The named optimizer, with the arguments that its class knows changed; ``eps`` goes to the Adam family alone."""
    kind, arguments = OPTIMIZERS[name]
    arguments = {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}
    known = kind.__init__.__annotations__
    return kind(parameters, **{**arguments, **{k: v for k, v in changes.items() if k in known}})


class SmallModule(L.LightningModule):
    """What the models have in common.

    Args:
        optimizer: a name of OPTIMIZERS.
        dropout: its probability.
        scheduler: ``None``, ``"one_cycle"`` or ``"cosine"``, stepped every batch.
        eps: for optimizers that have one.
        groups: give the optimizer two parameter groups with different settings.
    """

    def __init__(
        self,
        optimizer: str = "sgd",
        dropout: float = 0.1,
        scheduler: str | None = None,
        eps: float | None = None,
        groups: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.dropout = dropout

    def configure_optimizers(self) -> Any:
        wanted = self.hparams
        changes = {} if wanted.eps is None else {"eps": wanted.eps}
        optimizer = build_optimizer(wanted.optimizer, self._parameters_or_groups(), **changes)
        if wanted.scheduler is None:
            return optimizer
        if wanted.scheduler == "one_cycle":
            scheduler: Any = O.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=200)
        else:
            scheduler = O.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _parameters_or_groups(self) -> Any:
        if not self.hparams.groups:
            return self.parameters()
        flat = [p for p in self.parameters() if p.ndim < 2]
        deep = [p for p in self.parameters() if p.ndim >= 2]
        return [{"params": flat, "weight_decay": 0.0, "lr": 2e-3}, {"params": deep, "weight_decay": 0.1}]


class Block(nn.Module):
    """Attention with a fused qkv projection, then two linear layers."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            t.view(rows, length, self.heads, -1).transpose(1, 2)
            for t in self.qkv(self.before_attention(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.projection(seen.transpose(1, 2).reshape(rows, length, width)))
        return x + self.dropout(self.mlp(self.before_mlp(x)))


class GPT(SmallModule):
    """A GPT of one block on ``(tokens, targets)``; ``loss`` chooses what cross-entropy has to do.

    One block has what more would have (two residuals, norms of both, several buckets) at half the price of a graph.
    """

    def __init__(self, loss: str = "plain", width: int = 16, **settings: Any) -> None:
        super().__init__(**settings)
        self.loss = loss
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(Block(width, 2, self.dropout))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("class_weights", torch.linspace(0.5, 2.0, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self(tokens).flatten(0, 1)
        weight = self.class_weights if self.loss in ("weights", "everything") else None
        smoothing = 0.1 if self.loss in ("smoothing", "everything") else 0.0
        loss = F.cross_entropy(
            logits, targets.flatten(), weight=weight, label_smoothing=smoothing, ignore_index=IGNORED
        )
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("constant", 2.5)
        self.log("right", (logits.argmax(-1) == targets.flatten()).float().mean(), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens, targets = batch
        self.log("val_loss", F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)


class TiedGPT(GPT):
    """The output projection is the embedding table."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.head.weight = self.tokens.weight


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding of ``(rows, heads, length, width)``."""
    length, half = x.shape[-2], x.shape[-1] // 2
    places, powers = (torch.arange(n, device=x.device) for n in (length, half))
    angles = torch.outer(places, 100.0 ** (-powers / half))
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


class LlamaBlock(nn.Module):
    """Grouped-query attention (two query heads share a key head), rotary positions, a gated MLP, no biases."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        narrow = width // heads * key_heads
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, n, bias=False) for n in (width, narrow, narrow))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        h = self.before_attention(x)
        q = rotated(self.q(h).view(rows, length, self.heads, -1).transpose(1, 2))
        k = rotated(self.k(h).view(rows, length, self.key_heads, -1).transpose(1, 2))
        v = self.v(h).view(rows, length, self.key_heads, -1).transpose(1, 2)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(seen.transpose(1, 2).reshape(rows, length, width))
        h = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(GPT):
    """A GPT of one Llama block."""

    def __init__(self, width: int = 16, **settings: Any) -> None:
        super().__init__(width=width, **settings)
        self.blocks = nn.Sequential(LlamaBlock(width, 4, 2))
        self.norm = nn.RMSNorm(width)


class ConvNet(SmallModule):
    """Convolutions and batch norm on ``(image, label)``; returns a dict from training_step."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.net = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
            nn.Dropout(self.dropout), nn.Linear(8 * 9, CLASSES),
        )  # fmt: skip

    def forward(self, image: Tensor) -> Tensor:
        return self.net(image)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        image, label = batch
        logits = self(image)
        loss = F.cross_entropy(logits, label)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", logits.amax(), on_step=True, on_epoch=True, reduce_fx="max")
        return {"loss": loss, "twice": loss.detach() * 2}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)


class MLP(SmallModule):
    """A dict batch with file names in it, and torchmetrics used in every way: update, forward, logged as an object."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(16, CLASSES))
        kind = torchmetrics.classification.MulticlassAccuracy
        self.accuracy, self.by_forward = kind(CLASSES), kind(CLASSES, average="micro")
        self.mean = torchmetrics.MeanMetric()
        self.several = torchmetrics.MetricCollection(
            {"a": kind(CLASSES), "b": kind(CLASSES, top_k=2)}, prefix="several/"
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.accuracy.update(logits, batch["y"])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("by_forward", self.by_forward(logits, batch["y"]), on_step=True, on_epoch=False)
        self.mean.update(loss)
        self.several.update(logits, batch["y"])
        self.log_dict(self.several, on_step=False, on_epoch=True)
        self.log_dict({"loss": loss, "sum": logits.sum(), "mean": self.mean}, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch["x"]), batch["y"]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch["x"]).argmax(-1)


MODELS: dict[str, Callable[..., SmallModule]] = {
    "gpt": GPT,
    "gpt_ignore_index": lambda **settings: GPT(loss="ignore_index", **settings),
    "gpt_smoothing": lambda **settings: GPT(loss="smoothing", **settings),
    "gpt_weights": lambda **settings: GPT(loss="weights", **settings),
    "gpt_everything": lambda **settings: GPT(loss="everything", **settings),
    "gpt_tied": TiedGPT,
    "gpt_llama": Llama,
    "conv": ConvNet,
    "mlp": MLP,
}


def samples(model: str, count: int, seed: int = 1) -> list[Any]:
    """``count`` samples for the named model; with ``ignore_index`` rows differ much in how many targets count."""
    generator = torch.Generator().manual_seed(seed)
    if model.startswith("gpt"):
        text = torch.randint(0, VOCABULARY, (count, LENGTH + 1), generator=generator)
        tokens, targets = text[:, :-1], text[:, 1:].clone()
        if model in ("gpt_ignore_index", "gpt_everything"):
            counted = torch.randint(1, LENGTH + 1, (count, 1), generator=generator)
            targets[torch.arange(LENGTH) >= counted] = IGNORED
        return list(zip(tokens, targets, strict=True))
    if model == "conv":
        images = torch.randn(count, 3, 12, 12, generator=generator)
        return list(zip(images, torch.randint(0, CLASSES, (count,), generator=generator), strict=True))
    x, y = torch.randn(count, 12, generator=generator), torch.randint(0, CLASSES, (count,), generator=generator)
    return [{"x": a, "y": b, "name": f"file{i}"} for i, (a, b) in enumerate(zip(x, y, strict=True))]
