"""What a style is applied to: one module, the options of the plan's entry, the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.placement import Placement, Shard, blocks_of

PlacementsByName: TypeAlias = dict[str, Placement]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Target:
    """One module of a plan.

    Args:
        path: the module's path.
        module: the module; only shapes are read, so it may be on the meta device.
        style: name of the style.
        size: number of ranks of the axis.
        options: the other keys of the plan's entry.
        axis: name of the axis.
    """

    path: str
    module: nn.Module
    style: str
    size: int
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    axis: str = "tensor_parallel"

    def error(self, reason: str) -> ConfigurationError:
        """An error about this module."""
        kind = type(self.module).__name__
        return ConfigurationError(
            f"{self.axis}_plan: style {self.style!r} cannot be applied to {self.path!r} ({kind}) "
            f"with {self.axis}_size={self.size}: {reason}"
        )

    def known_options(self, *names: str) -> None:
        """Refuse options that the style does not have."""
        unknown = sorted(set(self.options) - set(names))
        if unknown:
            has = f"its options are {', '.join(map(repr, names))}" if names else "it has none"
            raise self.error(f"unknown option {unknown[0]!r}; {has}")

    @property
    def weight(self) -> Tensor:
        """The module's own weight."""
        found = dict(self.module.named_parameters(recurse=False)).get("weight")
        if found is None:
            raise self.error("it has no parameter named 'weight' of its own; choose the layers inside it")
        return found

    @property
    def bias(self) -> Tensor | None:
        """The module's own bias."""
        return dict(self.module.named_parameters(recurse=False)).get("bias")

    def channel_vectors(self) -> list[str]:
        """Names of all tensors with one number a channel, if that is all the module has (batch normalization)."""
        tensors = [*self.module.named_parameters(recurse=False), *self.module.named_buffers(recurse=False)]
        vectors = [name for name, tensor in tensors if tensor.ndim == 1]
        return vectors if all(tensor.ndim <= 1 for _, tensor in tensors) else []

    def features(self) -> tuple[int, int]:
        """The weight's dimensions of (input, output) features.

        A product with a weight of shape (in, out), as Hugging Face's ``Conv1D`` does, is recognised by the bias or
        said by the option ``transposed``.
        """
        weight, bias = self.weight, self.bias
        if isinstance(self.module, _TRANSPOSED_CONVOLUTIONS):
            return 0, 1
        if weight.ndim < 2:
            raise self.error(f"its weight has shape {list(weight.shape)}, which is no matrix")
        if isinstance(self.module, (nn.Linear, *_CONVOLUTIONS)):
            return 1, 0
        transposed = self.options.get("transposed")
        if transposed is None:
            named = type(self.module).__name__ == "Conv1D"
            by_bias = bias is not None and bias.shape[0] == weight.shape[1] != weight.shape[0]
            transposed = weight.ndim == 2 and (named or by_bias)
        return (0, 1) if transposed else (1, 0)

    def check_groups(self) -> None:
        """Grouped convolutions are split by whole groups."""
        groups = getattr(self.module, "groups", 1)
        if isinstance(groups, int) and groups > 1 and groups % self.size:
            raise self.error(f"its {groups} groups are not divisible by {self.size}")

    def split(self, tensor: Tensor, dim: int, what: str) -> Shard:
        """The placement that splits a dimension, in the parts that the options name.

        Args:
            tensor: the parameter.
            dim: its dimension.
            what: what the dimension is, for errors.
        """
        total = tensor.shape[dim]
        sizes = self._parts(total, what)
        for size in sizes:
            if size % self.size or not size:
                part = f"a part of {size} of its" if len(sizes) > 1 else f"its {size}"
                raise self.error(f"{part} {what} (shape {list(tensor.shape)}) cannot be divided by {self.size}")
        return Shard(dim, blocks_of(sizes))

    def _parts(self, total: int, what: str) -> Sequence[int]:
        parts = self.options.get("parts", 1)
        if isinstance(parts, int) and not isinstance(parts, bool) and parts > 0:
            if total % parts:
                raise self.error(f"its {total} {what} are not {parts} equal parts; give their sizes as a list")
            return [total // parts] * parts
        if isinstance(parts, Sequence) and all(isinstance(p, int) and p > 0 for p in parts) and parts:
            if sum(parts) != total:
                raise self.error(f"parts {list(parts)} add up to {sum(parts)}, but it has {total} {what}")
            return parts
        raise self.error(f"'parts' must be a positive number or a list of sizes, got {parts!r}")
