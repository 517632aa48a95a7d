"""Tripwires replace parts of a batch that one rank alone has, while the batch's tensors have the rows of all ranks.

``{"x": ..., "names": [...], "count": len(samples)}``: a step sees the rows of all ranks in tensors, but only its own
rank's entries of a list. A loss divided by ``len(names)`` or ``count`` would be too large by the number of ranks, on
all of them alike, and nothing would show it. So any use of such a value is reported; it may be passed on and returned.
When the step is over, a tripwire behaves as its value.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from lightning_spmd.ir.steps import LeafRef
from lightning_spmd.ir.tree import map_leaves
from lightning_spmd.stages.capture.user_code import location_of, user_location

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "bool": bool, "len": len, "iter": iter, "hash": hash, "str": str, "repr": repr, "format": format, "int": int,
    "float": float, "complex": complex, "round": round, "bytes": bytes, "reversed": reversed, "copy": copy.copy,
    "contains": operator.contains, "deepcopy": copy.deepcopy, "index": operator.index,
}  # fmt: skip
_ARITHMETIC = (
    "add", "sub", "mul", "truediv", "pow", "mod", "floordiv", "divmod", "and", "or", "xor", "lshift", "rshift",
)  # fmt: skip
_METHODS = (
    "call", "getitem", "eq", "ne", "lt", "le", "gt", "ge", "fspath", "neg", "abs", "trunc", "floor", "ceil", "pos",
    "invert", "setitem", "delitem", "reduce_ex",
)  # fmt: skip


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda value, other: function(other, value)


for _name in _ARITHMETIC:
    _function = divmod if _name == "divmod" else getattr(operator, f"__{_name}__")
    _FUNCTIONS.update({_name: _function, f"r{_name}": _reflected(_function)})


class Tripwires:
    """The tripwires of one step.

    Args:
        tell: told why a value may not be looked at in the step, and ``file:line``; does not return.

    Attributes:
        is_over: the step is; values may be looked at.
    """

    def __init__(self, tell: Callable[[str, str | None], NoReturn]) -> None:
        self.is_over = False
        self._tell = tell
        self._handed_out: dict[str, str] = {}

    def stand_in(self, path: str, value: Any, position: int, refusal: str) -> Any:
        """The tripwire of a value.

        Args:
            path: of it in the batch.
            value: a leaf of the batch, or a list of such.
            position: of its first leaf among those of the batch.
            refusal: why the step must not look at it.
        """
        self._handed_out[path] = refusal
        return _stands_for(path)(self, value, position, refusal)

    def look(self, refusal: str) -> None:
        """Report that a tripwire was triggered."""
        if not self.is_over:
            self._tell(refusal, user_location())

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """A context that recognises tripwires in type errors of C code (``torch.stack(batch["parts"])``)."""
        try:
            yield
        except TypeError as error:
            for path, refusal in self._handed_out.items():
                if re.search(rf"\bbatch{re.escape(path)}(?![\[.\w])", str(error)):
                    self._tell(refusal, location_of(error))
            raise


class Tripwire:
    """Stands for one value.

    Args:
        wires: those of the step.
        value: it.
        position: of its first leaf.
        refusal: why the step must not look at it.
    """

    is_tree_leaf = True

    def __init__(self, wires: Tripwires, value: Any, position: int, refusal: str) -> None:
        object.__setattr__(self, "_stands_for", (wires, value, position, refusal))

    def __getattribute__(self, name: str) -> Any:
        return getattr(_looked_at(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_looked_at(self), name, value)


def _looked_at(wire: Tripwire) -> Any:
    wires, value, _, refusal = object.__getattribute__(wire, "_stands_for")
    wires.look(refusal)
    return value


def _use(name: str) -> Callable[..., Any]:
    def use(self: Tripwire, *args: Any, **kwargs: Any) -> Any:
        value = _looked_at(self)
        if name in _FUNCTIONS:
            return _FUNCTIONS[name](value, *args)
        method = getattr(type(value), f"__{name}__", None)
        return NotImplemented if method is None else method(value, *args, **kwargs)

    return use


for _name in (*_FUNCTIONS, *_METHODS):
    setattr(Tripwire, f"__{_name}__", _use(_name))


@functools.lru_cache(maxsize=4096)
def _stands_for(path: str) -> type[Tripwire]:
    """The class of a tripwire. Error messages of C code show its name."""
    return type(f"batch{path}", (Tripwire,), {})


def is_tripwire(value: Any) -> bool:
    """Whether an object is a tripwire."""
    return issubclass(type(value), Tripwire)


def value_of(wire: Tripwire) -> Any:
    """The value behind a tripwire, without triggering it."""
    return object.__getattribute__(wire, "_stands_for")[1]


def reference_to(wire: Tripwire) -> Any:
    """A reference to the leaf of the batch, for recorded calls."""
    _, value, position, _ = object.__getattribute__(wire, "_stands_for")
    count = position - 1

    def reference(_: str, __: Any) -> LeafRef:
        nonlocal count
        count += 1
        return LeafRef(count)

    return map_leaves(reference, value) if type(value) in (list, tuple) else LeafRef(position)
