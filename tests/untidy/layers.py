"""Layers and parameters: frozen, exchanged and added inside of the step, with settings that follow a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, rnn

from tests.untidy.untidy import CLASSES, ROWS, WIDTH, Untidy, plain


class Frozen(Untidy):
    """The first layer is frozen inside of step 8, and trains again from step 16 on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 8:
            self.body.requires_grad_(False)
        if batch_idx == 16:
            self.body.requires_grad_(True)
        return self.loss(*batch)


class UnfrozenByCount(Untidy):
    """Layers begin frozen; a counter of the module's own thaws one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)
        self.head.weight.requires_grad_(False)
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        if self.steps == 6:
            for parameter in self.head.parameters():
                parameter.requires_grad = True
        if self.steps == 12:
            self.body.requires_grad_()
        return self.loss(*batch)

    def kept(self) -> Any:
        return self.steps, [parameter.requires_grad for parameter in self.parameters()]


class Swapped(Untidy):
    """The head is exchanged for one that lay in a list, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [nn.Linear(WIDTH, CLASSES)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx in (9, 18):
            self.head, self.others[0] = self.others[0], self.head
        return self.loss(*batch)

    def kept(self) -> Any:
        return plain(self.others[0].state_dict())


class Added(Untidy):
    """A layer is added in the middle, and given to the optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 10:
            self.extra = nn.Linear(WIDTH, WIDTH)
            self.trainer.optimizers[0].add_param_group({"params": self.extra.parameters(), "lr": 0.02})
        h = self.hidden(batch[0])
        for name, layer in self.named_children():
            if name == "extra":
                h = h + torch.tanh(layer(h))
        return F.cross_entropy(self.head(h), batch[1])


class NewParameter(Untidy):
    """A parameter that no optimizer has is replaced by a new one, made of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 8 == 7:
            self.temperature = nn.Parameter(self.temperature.detach() * 0.8)
        return F.cross_entropy(self(batch[0]) / self.temperature, batch[1])


class Rate(Untidy):
    """The step itself sets the optimizer's rate, and logs it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        group = self.trainer.optimizers[0].param_groups[0]
        group["lr"] = 0.05 * (batch_idx + 1) / 10 if batch_idx < 10 else group["lr"] * 0.97
        self.log("rate", group["lr"])
        return self.loss(*batch)


class MomentumReset(Untidy):
    """The optimizer's state is looked at and cleared in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        state = self.trainer.optimizers[0].state
        if batch_idx % 9 == 8:
            state.clear()
        found = state[self.head.weight].get("momentum_buffer") if self.head.weight in state else None
        self.norms.append(0.0 if found is None else float(found.norm()))
        return self.loss(*batch) * (1 + self.norms[-1])

    def kept(self) -> Any:
        return self.norms


class Normalized(Untidy):
    """BatchNorm, whose running statistics the loss looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.body(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        mean = self.norm.running_mean
        assert mean is not None
        return loss + 0.01 * (self.norm.bias - mean).square().sum()


class NormalizedThenNot(Normalized):
    """BatchNorm is put into evaluation at step 12; its momentum falls before."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.norm.momentum = 0.3 / (1 + batch_idx)
        if batch_idx == 12:
            self.norm.eval()
        return self.loss(*batch)

    def kept(self) -> Any:
        return self.norm.training, self.norm.momentum


class DropoutScheduled(Untidy):
    """The probability of dropout rises by a little in each step."""

    draws = True

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def hidden(self, x: Tensor) -> Tensor:
        return self.dropout(super().hidden(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.dropout.p = min(0.3, self.dropout.p + 0.02)
        return self.loss(*batch)

    def kept(self) -> Any:
        return self.dropout.p


class SmoothingScheduled(Untidy):
    """Label smoothing falls, in a loss module and in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion, self.smoothing = nn.CrossEntropyLoss(label_smoothing=0.3), 0.2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.criterion.label_smoothing *= 0.9
        self.smoothing = max(0.0, self.smoothing - 0.01)
        return self.criterion(logits, y) + F.cross_entropy(logits, y, label_smoothing=self.smoothing)

    def kept(self) -> Any:
        return self.smoothing, self.criterion.label_smoothing


class Parametrized(Untidy):
    """Weight and spectral norm by torch's parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.body)
        parametrizations.spectral_norm(self.head)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch) + 0.01 * self.head.weight.square().sum()


class InTurn(Untidy):
    """Blocks are used in turn, by the number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.turn = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = torch.tanh(self.blocks[self.turn](self.hidden(batch[0])))
        self.turn = (self.turn + 1) % len(self.blocks)
        return F.cross_entropy(self.head(h), batch[1])

    def kept(self) -> Any:
        return self.turn


class HookInTheStep(Untidy):
    """A forward hook is registered for the step alone; it notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[list[int]] = []
        self.seen: Tensor = torch.zeros(())

    def note(self, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.shapes.append(list(output.shape))
        self.seen = output.detach().mean()
        return output * 1.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        handle = self.body.register_forward_hook(self.note)
        loss = self.loss(*batch)
        handle.remove()
        return loss + 0.1 * (self.body.bias.mean() - self.seen).square()

    def kept(self) -> Any:
        return self.shapes, self.seen.item()


class ResetHead(Untidy):
    """The head is initialized anew in the middle of the training."""

    draws = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx in (7, 15):
            nn.init.xavier_uniform_(self.head.weight)
            nn.init.zeros_(self.head.bias)
        return self.loss(*batch)


class Pruned(Untidy):
    """A mask of the smallest weights is made every sixth step and applied in all others."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[str, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 6 == 5:
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    smallest = parameter.abs().flatten().kthvalue(parameter.numel() // 4).values
                    self.masks[name] = parameter.detach().abs() > smallest
        for name, mask in self.masks.items():
            self.get_parameter(name).data.mul_(mask)
        return self.loss(*batch)

    def kept(self) -> Any:
        return plain(self.masks)


class Tied(Untidy):
    """Two layers share a weight, until the step unties them."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(8, WIDTH)
        self.back.weight = self.body.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 14:
            self.back.weight = nn.Parameter(self.body.weight.detach().clone())
        x, y = batch
        h = self.hidden(x)
        return F.cross_entropy(self.head(h), y) + 0.1 * F.mse_loss(h @ self.back.weight, x)

    def kept(self) -> Any:
        return self.back.weight is self.body.weight


class Bags(Untidy):
    """Bags of embeddings, whose borders are made of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(10, WIDTH, mode="mean")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        words = (x.abs() * 3).long().clamp(max=9)
        lengths = 1 + (x[:, 0].abs() * 2).long().clamp(max=7)
        flat = torch.cat([row[:length] for row, length in zip(words, lengths.tolist(), strict=True)])
        offsets = F.pad(lengths.cumsum(0)[:-1], (1, 0))
        return F.cross_entropy(self.head(self.bags(flat, offsets)), y)


class Packed(Untidy):
    """An LSTM over packed sequences whose lengths come from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, WIDTH, batch_first=True)
        self.longest = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        lengths = 1 + (x[:, 0].abs() * 3).long().clamp(max=7)
        self.longest = max(self.longest, int(lengths.sum()))
        packed = rnn.pack_padded_sequence(x[:, :, None], lengths, batch_first=True, enforce_sorted=False)
        output, (state, _) = self.lstm(packed)
        padded, sizes = rnn.pad_packed_sequence(output, batch_first=True)
        mean = padded.sum(1) / sizes[:, None]
        return F.cross_entropy(self.head(state[-1] + mean), y)

    def kept(self) -> Any:
        return self.longest


class Attention(Untidy):
    """Attention by einsum over slices of the row, with a mask that is kept and grown when needed."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(2, 3 * WIDTH)
        self.mask: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        steps = x.view(ROWS if len(x) == ROWS else -1, 4, 2)[:, : 2 + batch_idx // 8]
        q, k, v = self.qkv(steps).view(len(x), -1, 3, 2, WIDTH // 2).unbind(2)
        length = q.shape[1]
        if self.mask is None or self.mask.shape[0] < length:
            self.mask = torch.full((length, length), float("-inf")).triu(1)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5 + self.mask[:length, :length]
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        return F.cross_entropy(self.head(mixed.flatten(2).mean(1)), y)

    def kept(self) -> Any:
        return plain(self.mask)


@torch.jit.script
def gated(x: Tensor, limit: float) -> Tensor:
    """A scripted function that decides by a value; of operators that its own autograd rounds as torch's."""
    if bool(x.mean() > limit):
        return x.clamp(min=0.0)
    return x.abs() * 0.5


class Scripted(Untidy):
    """A jit.script function inside of the step, with a number that changes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = gated(self.body(batch[0]), 0.05 * (batch_idx % 3) - 0.05)
        return F.cross_entropy(self.head(h), batch[1])


class HalfPrecision(Untidy):
    """A part of the step runs under autocast of its own, which is switched on and off."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=batch_idx % 4 != 3):
            h = self.hidden(batch[0])
        return F.cross_entropy(self.head(h.float()), batch[1])


class FunctionalCall(Untidy):
    """The net is called with weights that are moved a little, by functional_call."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        moved = {name: p + 0.01 * p.sign() for name, p in self.head.named_parameters()}
        h = self.hidden(x)
        logits: Any = torch.func.functional_call(self.head, moved, (h,))
        return F.cross_entropy(logits, y) + 0.5 * F.cross_entropy(self.head(h), y)


class Modes(Untidy):
    """The module is put into evaluation for labels of its own, and back into training."""

    draws = True

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def hidden(self, x: Tensor) -> Tensor:
        return self.dropout(super().hidden(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.eval()
        with torch.no_grad():
            probabilities = self(x).softmax(1)
        self.train()
        sure = probabilities.amax(1) > 0.5
        logits = self(x)
        own = F.cross_entropy(logits, probabilities.argmax(1), reduction="none")
        return F.cross_entropy(logits, y) + 0.1 * (own * sure).mean()


class ActivationChosen(Untidy):
    """The activation is a function in a list, another one every few steps."""

    def __init__(self) -> None:
        super().__init__()
        self.choices: list[Callable[[Tensor], Tensor]] = [torch.relu, torch.tanh, F.gelu, lambda t: t * t.sigmoid()]
        self.activation = self.choices[0]

    def hidden(self, x: Tensor) -> Tensor:
        return self.activation(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 5 == 4:
            self.choices.append(self.choices.pop(0))
            self.activation = self.choices[0]
        return self.loss(*batch)

    def kept(self) -> Any:
        return self.choices.index(self.activation)


CASES = (
    Frozen,
    UnfrozenByCount,
    Swapped,
    Added,
    NewParameter,
    Rate,
    MomentumReset,
    Normalized,
    NormalizedThenNot,
    DropoutScheduled,
    SmoothingScheduled,
    Parametrized,
    InTurn,
    HookInTheStep,
    ResetHead,
    Pruned,
    Tied,
    Bags,
    Packed,
    Attention,
    Scripted,
    HalfPrecision,
    FunctionalCall,
    Modes,
    ActivationChosen,
)
