"""What comes past torch's functions in a step that is followed: recorded below, run for good, never silent."""

from __future__ import annotations

import copy
import ctypes
import io
import logging
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.training import assert_bitwise
from tests.strategy.small import Net, Quiet, run


def _pointer(h: Tensor) -> Any:
    copied = h.detach().contiguous()
    return (ctypes.c_float * copied.numel()).from_address(copied.data_ptr())[0]


def _dlpack(h: Tensor) -> Any:
    return torch.from_dlpack(h.detach()).sum()


def _numpy(h: Tensor) -> Any:
    return torch.from_numpy(h.detach().numpy()).sum()


def _saved(h: Tensor) -> Any:
    file = io.BytesIO()
    torch.save({"h": h.detach()}, file)
    file.seek(0)
    return torch.load(file)["h"].sum()


def _pickled(h: Tensor) -> Any:
    return pickle.loads(pickle.dumps(h.detach())).sum()


def _copied(h: Tensor) -> Any:
    return copy.copy(h.detach()).sum() + copy.deepcopy(h.detach()).sum()


@torch.jit.script
def _scripted_function(x: Tensor) -> Tensor:
    y = x
    for i in range(3):
        y = y * 0.5 + i
    return y


_traced = torch.jit.trace(lambda x: torch.sin(x).sum(), torch.ones(2, 2))
_compiled = torch.compile(lambda x: torch.cos(x).sum(), backend="eager")


def _scripted(h: Tensor) -> Any:
    return _scripted_function(h).mean()


def _storage(h: Tensor) -> Any:
    return h.detach().contiguous().untyped_storage().nbytes() + h.detach().contiguous().storage()[0]


def _shared(h: Tensor) -> Any:
    return h.detach().clone().share_memory_().sum()


def _swapped(h: Tensor) -> Any:
    one, other = h.detach() * 2, h.detach() * 3
    torch.utils.swap_tensors(one, other)
    return one.sum()


def _weakly(h: Tensor) -> Any:
    held = h * 2
    reference = weakref.ref(held)
    return reference().sum()  # type: ignore[union-attr]


def _logged(h: Tensor) -> Any:
    logging.getLogger("a step's").warning("%s", h.detach().sum())
    return 1.0


def _vectorized(h: Tensor) -> Any:
    return torch.func.vmap(lambda row: row.sin().sum())(h).sum()


def _buffer(h: Tensor) -> Any:
    data: Any = h.detach().numpy()
    return len(memoryview(data)) + bytes(h.detach().numpy().tobytes())[0] % 2


def _set(h: Tensor) -> Any:
    other = torch.empty(0)
    other.set_(h.detach().clone())  # type: ignore[arg-type]
    return other.sum()


@torch.jit.script
def _chosen(x: Tensor) -> Tensor:
    return (x[x > 0] * 2).sum()


def _scripted_size(h: Tensor) -> Any:
    return _chosen(h)


def _raises(h: Tensor) -> Any:
    try:
        return h @ h[:3]
    except RuntimeError:
        return h.mean()


WAYS: list[Any] = [
    _pointer, _dlpack, _numpy, _saved, _pickled, _copied, _scripted, _traced, _compiled, _storage, _shared, _swapped,
    _weakly, _logged, _vectorized, _buffer, _set, _scripted_size, _raises,
]  # fmt: skip


class Uses(Quiet):
    """Weighs the loss with what a way gives of the layer in the middle."""

    way: Callable[[Tensor], Any]
    runs = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        type(self).runs += 1
        way = type(self).__dict__["way"]
        h = torch.tanh(self.first(batch[0]))
        factor = way(h)
        return nn.functional.cross_entropy(self.last(h), batch[1]) * (1 + 0.001 * factor)


@pytest.mark.parametrize("way", WAYS, ids=[getattr(way, "__name__", str(i)).strip("_") for i, way in enumerate(WAYS)])
def test_what_it_gives_is_eager_s(way: Any) -> None:
    kind: type[Net] = type("Uses", (Uses,), {"way": way, "runs": 0})
    theirs, ours = run(kind, "auto", max_epochs=1), run(kind, max_epochs=1)
    assert_bitwise(ours, theirs)
    assert kind.runs == 12  # type: ignore[attr-defined]


class PrintsBeside(Quiet):
    """A thread draws, prints and computes on tensors of its own while the step computes."""

    def beside(self, seen: list[float]) -> None:
        generator = torch.Generator().manual_seed(1)
        seen += [torch.rand(2, generator=generator).sum().item(), float(str(torch.tensor(0.5))[7:-1])]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        seen: list[float] = []
        thread = threading.Thread(target=self.beside, args=(seen,))
        thread.start()
        loss = super().training_step(batch, batch_idx)
        thread.join()
        return loss * sum(seen)


def test_threads_with_tensors_of_their_own_disturb_nothing() -> None:
    assert_bitwise(run(PrintsBeside, max_epochs=1), run(PrintsBeside, "auto", max_epochs=1))
