"""Lists on a module that an evaluation step appends to: Lightning's recipe for what the end of an epoch works on.

    self.outputs.append(loss)        in validation_step; on_validation_epoch_end reads the list and clears it

Of dictionaries those that get items under a recorded number: ``self.losses[batch_idx] = loss``.

A first capture notices that a list grew. The next one puts an :class:`AppendOnly` in its place, and every item becomes
a recorded call that is made again after each run. A step that also looks at the list cannot be a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from lightning_spmd.errors import CaptureError
from lightning_spmd.messages import batch_hook, the_step
from lightning_spmd.stages.capture.host_scalar import SYMBOLS
from lightning_spmd.stages.capture.user_code import user_location

Place = tuple[str, str]
"""Path of a module, name of its attribute."""


class AppendOnly:
    """Stands for a list during capture.

    Args:
        place: where it is.
        record: told each item; of a dictionary a pair.
        kind: ``list`` or ``dict``.
    """

    def __init__(self, place: Place, record: Callable[[Place, Any], None], kind: type = list) -> None:
        self._place, self._record, self._kind = place, record, kind

    def append(self, item: Any) -> None:
        """Remember one item."""
        if self._kind is not list:
            self.looked_at()
        self._record(self._place, item)

    def __setitem__(self, key: Any, item: Any) -> None:
        """Put one item, of a dictionary."""
        if self._kind is not dict:
            self.looked_at()
        self._record(self._place, (key, item))

    def extend(self, items: Iterable[Any]) -> None:
        """Remember several."""
        for item in items:
            self.append(item)

    def __iadd__(self, items: Iterable[Any]) -> AppendOnly:
        self.extend(items)
        return self

    def looked_at(self, *_: Any) -> Any:
        """Any other use.

        Raises:
            CaptureError: always, naming the list.
        """
        raise CaptureError(
            f"{the_step()} appends to {_readable(self._place)} and looks at it; that would see the same items for "
            f"ever. Look at it in {batch_hook('end')} or at the epoch's end",
            user_location(),
        )

    def __getattr__(self, name: str) -> Any:
        return self.looked_at()

    __len__ = __iter__ = __getitem__ = __delitem__ = __contains__ = __bool__ = __add__ = looked_at


def _readable(place: Place) -> str:
    return f"{place[0] or 'self'}.{place[1]}"


@contextlib.contextmanager
def lists_followed(module: nn.Module, grown: set[Place], record: Callable[[Place, Any], None]) -> Iterator[None]:
    """Put an :class:`AppendOnly` in each place of ``grown``, and add the places of other lists that grow.

    Args:
        module: the LightningModule.
        grown: places that an earlier capture found; changed.
        record: told each item that is appended in one of them.
    """
    owners = dict(module.named_modules())
    kept = {place: owners[place[0]].__dict__[place[1]] for place in grown}
    before = {
        (path, name): (value, list(value))
        for path, owner in owners.items()
        for name, value in owner.__dict__.items()
        if type(value) in (list, dict) and (path, name) not in grown
    }
    for place, value in kept.items():
        owners[place[0]].__dict__[place[1]] = AppendOnly(place, record, type(value))
    try:
        yield
    finally:
        for (path, name), value in kept.items():
            owners[path].__dict__[name] = value
        for (path, name), (value, items) in before.items():
            same = all(a is b for a, b in zip(value, items, strict=False))
            new = value if type(value) is list else [key for key in value if type(key) in SYMBOLS]
            if owners[path].__dict__.get(name) is value and same and len(value) > len(items) and new:
                grown.add((path, name))
