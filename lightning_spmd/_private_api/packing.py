"""What packs sequences for recurrent layers in torch: functions of Python that modules import by name.

Their code is exchanged, so that everybody who has one of them calls the replacement, wherever it was imported. In
threads that trace nothing it leads to the original, and it is the original again once the last trace has ended.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator, Mapping
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
_lock = threading.Lock()
_traces: list[object] = []
_here = threading.local()


def in_place_of(name: str) -> Callable[..., Any]:
    """What a function is in this thread."""
    return getattr(_here, "replacements", ORIGINAL_PACKING)[name]


@contextlib.contextmanager
def packing_replaced(replacements: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Other functions in place of torch's in this thread.

    Args:
        replacements: them, for ``pack`` (``pack_padded_sequence``), ``pad`` (``pad_packed_sequence``), and what
            ``lstm``, ``gru`` and ``rnn`` do forward.
    """
    before = getattr(_here, "replacements", ORIGINAL_PACKING)
    with _lock:
        _traces.append(replacements)
        for function, other in _FUNCTIONS.values():
            function.__code__ = other.__code__
    _here.replacements = replacements
    try:
        yield
    finally:
        _here.replacements = before
        with _lock:
            _traces.pop()
            for name, (function, _) in _FUNCTIONS.items():
                function.__code__ = function.__code__ if _traces else _CODES[name]


def weights_of(layer: nn.RNNBase) -> list[Tensor]:
    """The weights of a recurrent layer, as its forward pass takes them."""
    layer._update_flat_weights()
    return [w for w in layer._flat_weights if w is not None]
