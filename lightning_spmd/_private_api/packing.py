"""What packs sequences for recurrent layers in torch: functions of Python that modules import by name.

Their code is exchanged, so that everybody who has one of them calls the replacement, wherever it was imported. Outside
of steps, and in other threads, it leads to the original. It is exchanged by the first step and is torch's again once a
run has ended: an exchange in each step would undo what the interpreter has specialized.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import rnn


def _pack(input: Any, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Any:
    from lightning_spmd._private_api.packing import in_place_of

    return in_place_of("pack")(input, lengths, batch_first, enforce_sorted)


def _pad(sequence: Any, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None) -> Any:
    from lightning_spmd._private_api.packing import in_place_of

    return in_place_of("pad")(sequence, batch_first, padding_value, total_length)


def _lstm(self: Any, input: Any, hx: Any = None) -> Any:
    from lightning_spmd._private_api.packing import in_place_of

    return in_place_of("lstm")(self, input, hx)


def _gru(self: Any, input: Any, hx: Any = None) -> Any:
    from lightning_spmd._private_api.packing import in_place_of

    return in_place_of("gru")(self, input, hx)


def _rnn(self: Any, input: Any, hx: Any = None) -> Any:
    from lightning_spmd._private_api.packing import in_place_of

    return in_place_of("rnn")(self, input, hx)


_FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "pack": (rnn.pack_padded_sequence, _pack),
    "pad": (rnn.pad_packed_sequence, _pad),
    "lstm": (nn.LSTM.forward, _lstm),
    "gru": (nn.GRU.forward, _gru),
    "rnn": (nn.RNN.forward, _rnn),
}
ORIGINAL_PACKING: dict[str, Callable[..., Any]] = {
    name: types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    for name, (f, _) in _FUNCTIONS.items()
}
_CODES = {name: f.__code__ for name, (f, _) in _FUNCTIONS.items()}
_here = threading.local()


def in_place_of(name: str) -> Callable[..., Any]:
    """What a function is in this thread."""
    replacements = getattr(_here, "replacements", None)
    return ORIGINAL_PACKING[name] if replacements is None else replacements.in_place_of(name)


def replace_packing(replacements: Any) -> None:
    """Have other functions in place of torch's in this thread, or torch's own again.

    Args:
        replacements: its ``in_place_of`` gives them, for ``pack`` (``pack_padded_sequence``), ``pad``
            (``pad_packed_sequence``), and what ``lstm``, ``gru`` and ``rnn`` do forward; None: torch's.
    """
    _here.replacements = replacements
    for function, other in _FUNCTIONS.values() if rnn.pack_padded_sequence.__code__ is not _pack.__code__ else ():
        function.__code__ = other.__code__


def leave_packing() -> None:
    """The code of torch's functions is their own."""
    for name, (function, _) in _FUNCTIONS.items():
        function.__code__ = _CODES[name]


def weights_of(layer: nn.RNNBase) -> list[Tensor]:
    """The weights of a recurrent layer, as its forward pass takes them."""
    layer._update_flat_weights()
    return [w for w in layer._flat_weights if w is not None]
