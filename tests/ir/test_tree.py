"""Batches of classes that watch their fields: taken apart and put together without asking them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spmd.ir.tree import leaves, map_leaves


class _Checked:
    """A descriptor that lets tensors pass alone, as image libraries' batches have them."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return None if instance is None else vars(instance)[self.name]

    def __set__(self, instance: Any, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"{self.name} must be a tensor")
        vars(instance)[self.name] = value + 0  # and changes what it gets


@dataclass
class _Images:
    image: Any = _Checked()  # type: ignore[assignment]
    label: Any = 0


@dataclass(frozen=True, slots=True)
class _Slots:
    image: Any
    label: Any = 0


@pytest.mark.parametrize("kind", [_Images, _Slots])
def test_fields_take_whatever_stands_for_them(kind: Any) -> None:
    batch = kind(torch.arange(3), 7)
    found = leaves(batch)
    assert [(path, id(leaf)) for path, leaf in found] == [(".image", id(batch.image)), (".label", id(7))]
    other = map_leaves(lambda path, _: f"a stand-in of {path}", batch)
    assert (other.image, other.label) == ("a stand-in of .image", "a stand-in of .label")
    assert torch.equal(batch.image, torch.arange(3))
