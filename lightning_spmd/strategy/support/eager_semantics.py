"""How eager training on several ranks differs from one device, for messages."""

from __future__ import annotations

from torch import nn

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_MOST = 3


def averaged(module: nn.Module) -> str:
    """A remark in brackets: gradients are averaged over the ranks, and where this module then differs from one device.

    Args:
        module: the trained module.
    """
    found: list[str] = []
    norms = [name for name, part in module.named_modules() if isinstance(part, _NORMS) and part.training]
    if norms:
        found.append(f"batch norm sees a rank's rows alone ({_named(norms)})")
    losses = [name for name, part in module.named_modules() if isinstance(part, _LOSSES) and part.reduction == "mean"]
    if losses:
        found.append(f"a mean over rows that count (ignore_index, weight) is each rank's own ({_named(losses)})")
    if not found:
        found.append("means over valid entries, and batches with other numbers of rows, are each rank's own")
    return f" (gradients averaged over the ranks, as DDP does, which is not one device's: {'; '.join(found)})"


def _named(names: list[str]) -> str:
    more = len(names) - _MOST
    return ", ".join(names[:_MOST]) + (f" and {more} more" if more > 0 else "")
