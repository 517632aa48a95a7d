"""Lets the user's own optimizer run on fake tensors and recorded numbers, and collects what it changed.

While swapped, ``param_groups`` hold the fake parameters, every float and int of a group is a recorded number (``lr``,
betas, counters that optimizers keep there) and ``state`` holds fake twins. State that does not exist yet is created by
the optimizer itself inside the graph, exactly as eager's first step does, and becomes a graph output.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError, UpdateMustWaitError
from lightning_spmd.ir.guards import ValueGuard
from lightning_spmd.ir.signature import InputRole, OutputRole
from lightning_spmd.messages import place_of
from lightning_spmd.stages.capture.numbers.host_scalar import scalar_of
from lightning_spmd.stages.capture.record.inputs import InputTable


def _put(optimizer: Optimizer, groups: list[dict[str, Any]], state: Any) -> None:
    """Give an optimizer other groups and another state."""
    holders = [_holder(optimizer, name) for name in ("param_groups", "state")]
    for holder, name, value in zip(holders, ("param_groups", "state"), (groups, state), strict=True):
        setattr(holder, name, value)


def _holder(optimizer: Optimizer, name: str) -> Optimizer:
    """Who has them: a wrapper (``Lookahead``) may show by a property what another optimizer has."""
    shows = inspect.getattr_static(type(optimizer), name, None)
    if not isinstance(shows, property) or shows.fset is not None:
        return optimizer
    inner = [v for v in vars(optimizer).values() if isinstance(v, Optimizer)]
    found = next((v for v in inner if getattr(v, name) is getattr(optimizer, name)), None)
    if found is None:
        raise CaptureError(f"{type(optimizer).__name__}.{name} is a property without a setter, of no optimizer within")
    return _holder(found, name)


class OptimizerSwap:
    """One optimizer on fake tensors.

    Args:
        optimizer: the live optimizer.
        names: fully qualified name of every live parameter, by ``id``.
        inputs: where fake twins and recorded numbers come from.
        first_group: number of its first group among those of all optimizers.
    """

    def __init__(self, optimizer: Optimizer, names: dict[int, str], inputs: InputTable, first_group: int = 0) -> None:
        self.optimizer = optimizer
        self.names = names
        self.inputs = inputs
        self._first_group = first_group
        self._live_groups = optimizer.param_groups
        self._live_state = optimizer.state
        self.groups: list[dict[str, Any]] = []
        self._handed: list[dict[str, Any]] = []  # the groups as the optimizer got them
        self.state: Any = defaultdict(dict)
        self._before: dict[tuple[str, str], Any] = {}
        self._behind: fx.Node | None = None  # the input behind which state begins
        self.is_torchs_own = is_torchs_own(optimizer)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The optimizer works on fakes inside; the live groups and state come back whatever happens."""
        if not self.groups:  # else a recording goes on
            self._begin()
        before = own_values(self.optimizer)
        try:
            _put(self.optimizer, self.groups, self.state)
            with private.optimizers_accept_fake_tensors():
                yield
        finally:
            _put(self.optimizer, self._live_groups, self._live_state)
        if changed := sorted({name for name, _ in own_values(self.optimizer) ^ before}):
            kind = type(self.optimizer)
            raise CaptureError(
                f"{kind.__name__}.step{place_of(kind.step)} changes {changed[0]} of its optimizer, and a graph of it "
                "does not: keep it in `state` or in a group"
            )

    def _begin(self) -> None:
        self.groups = [self._group(i, g) for i, g in enumerate(self._live_groups, self._first_group)]
        self._handed = [dict(group) for group in self.groups]
        self._behind = self.inputs.last
        for group in self._live_groups:
            for parameter in group["params"]:
                if parameter in self._live_state:
                    self.state[self._fake(parameter)] = self._state(parameter)

    def _fake(self, parameter: Tensor) -> Tensor:
        name = self.names[id(parameter)]
        return self.inputs.tensor(parameter, InputRole.PARAMETER, (name,), name)

    def _group(self, index: int, group: dict[str, Any]) -> dict[str, Any]:
        swapped: dict[str, Any] = {"params": [self._fake(p) for p in group["params"]]}
        for key, value in group.items():
            if key != "params":
                swapped[key] = self._lift((index, key), f"group {index}/{key}", value)
        return swapped

    def _lift(self, key: tuple[Any, ...], name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._known(value, self.inputs.tensor(value, InputRole.HYPER_PARAMETER, key, name))
        if isinstance(value, tuple):
            numbers = value and all(type(v) in (int, float) for v in value)
            return tuple(self._lift((*key, i), f"{name}[{i}]", v) for i, v in enumerate(value)) if numbers else value
        if type(value) in (int, float):
            return self.inputs.scalar(value, InputRole.HYPER_PARAMETER, key, name)
        return value

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        owner = self.names[id(parameter)]
        swapped: dict[str, Any] = {}
        for key, value in self._live_state[parameter].items():
            name = f"{owner}/{key}"
            if isinstance(value, Tensor):
                fake = self.inputs.tensor(value, InputRole.OPTIMIZER_STATE, (owner, key), name)
                swapped[key] = self._known(value, fake)
            elif type(value) in (int, float):
                swapped[key] = self.inputs.scalar(value, InputRole.OPTIMIZER_STATE, (owner, key), name)
            else:
                swapped[key] = value
            self._before[owner, key] = swapped[key]
        return swapped

    def _known(self, live: Tensor, fake: Tensor) -> Tensor:
        """The fake of a tensor that is one number on the host: the optimizer may take its value as a Python number."""
        if live.numel() == 1 and live.device.type == "cpu" and not isinstance(live, DTensor):
            self.inputs.recorder.known.note(fake, live.detach().clone())
        return fake

    def check_is_there(self) -> None:
        """Results of the step that Python has put into state or groups have values only when the step is over.

        Raises:
            UpdateMustWaitError: there are any.
        """
        for node, live in self.inputs.live.items():
            entry = self.inputs.entries[node]
            if entry.role in _OF_OPTIMIZERS and private.has_no_memory(live):
                raise UpdateMustWaitError(f"the step puts a tensor that it computes into the optimizer ({entry.name})")

    def changes(self) -> Iterator[tuple[OutputRole, tuple[Any, ...], str, Any]]:
        """(role, key, name, value) of state and hyper-parameters that the optimizer created or rebound."""
        for group_index, (live, swapped) in enumerate(zip(self._live_groups, self.groups, strict=True)):
            number = self._first_group + group_index
            for parameter in live["params"]:
                owner = self.names[id(parameter)]
                for key, value in self.state.get(self._fake(parameter), {}).items():
                    if value is not self._before.get((owner, key), _ABSENT) and not self._same(value, owner, key):
                        yield OutputRole.OPTIMIZER_STATE, (owner, key), f"{owner}/{key}", value
            for key, value in swapped.items():
                scalar = scalar_of(value)
                changed = value is not self._handed[group_index].get(key, _ABSENT)
                is_input = scalar is not None and (scalar.node is None or scalar.node in self.inputs.entries)
                if key != "params" and changed and not is_input:
                    yield OutputRole.HYPER_PARAMETER, (number, key), f"group {number}/{key}", value

    def _same(self, value: Any, owner: str, key: str) -> bool:
        scalar, before = scalar_of(value), scalar_of(self._before.get((owner, key)))
        return scalar is not None and before is not None and scalar.node is before.node

    def arrange(self, state: Mapping[tuple[Any, ...], fx.Node]) -> None:
        """Put the inputs that are state where they are once the optimizer has it.

        Args:
            state: inputs by name of the parameter and entry.
        """
        if self._behind is None:
            return
        for group in self._live_groups:
            for parameter in group["params"]:
                for key in self.state.get(self._fake(parameter), {}):
                    if (node := state.get((self.names[id(parameter)], key))) is not None:
                        self._behind.append(node)
                        self._behind = node

    def set(self, settings: Sequence[dict[str, Any]]) -> None:
        """The groups have these values from here on.

        Args:
            settings: of all groups, without their parameters.
        """
        for group, handed, own in zip(self.groups, self._handed, settings, strict=True):
            group.update(own)
            handed.update(own)

    def guards(self, *, stepped: bool) -> list[ValueGuard]:
        """Guards on the groups: structure and all that is not an input; on what its step finds if ``stepped``."""
        optimizer = self.optimizer

        def states() -> tuple[int, ...]:
            state = optimizer.state
            return tuple([len(state[p]) if p in state else 0 for g in optimizer.param_groups for p in g["params"]])

        constant = [
            (parameter, key, value)
            for parameter, entries in optimizer.state.items()
            for key, value in entries.items()
            if not isinstance(value, Tensor) and type(value) not in (int, float)
        ]

        def same() -> bool:
            return all(optimizer.state.get(parameter, {}).get(key) is value for parameter, key, value in constant)

        structure = _Structure(optimizer)
        guards = [ValueGuard("optimizer.param_groups", structure, structure(), _change)]
        if stepped and not is_torchs_own(optimizer):
            own = lambda: own_values(optimizer)  # noqa: E731
            guards.append(ValueGuard(f"an attribute of the {type(optimizer).__name__}", own, own()))
        if stepped and constant:  # None may be where later steps find a tensor
            guards.append(ValueGuard("whether optimizer.state has the captured values beside tensors", same, True))
        return [*guards, ValueGuard("the entries of optimizer.state", states, states())] if stepped else guards


_ABSENT = object()
_OF_OPTIMIZERS = (InputRole.OPTIMIZER_STATE, InputRole.HYPER_PARAMETER)


class _Structure:
    """The part of parameter groups that a graph depends on. Nearly always its objects are those of the last step.

    Args:
        optimizer: whose groups.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._seen: list[Any] = []
        self._found: Any = None

    def __call__(self) -> Any:
        """Parameters, keys, and the kinds of their values."""
        groups = self._optimizer.param_groups
        now = [x for g in groups for part in (g, g.values(), g["params"]) for x in part]
        if len(now) != len(self._seen) or not all(map(operator.is_, now, self._seen)):
            self._found = tuple(
                (tuple(map(id, g["params"])), tuple((k, _kind(v)) for k, v in g.items() if k != "params"))
                for g in groups
            )
            # a list or tensor may change and stay the same object
            fixed = all(isinstance(v, _FIXED) for g in groups for k, v in g.items() if k != "params")
            self._seen = now if fixed else []
        return self._found


def _change(before: Any, now: Any) -> str:
    """What of the groups changed, as :class:`_Structure` gives them."""
    if len(before) != len(now):
        return f"there are {len(now)} groups and were {len(before)}"
    for index, ((old_parameters, old), (new_parameters, new)) in enumerate(zip(before, now, strict=True)):
        if old_parameters != new_parameters:
            return f"group {index} has other parameters"
        old_kinds, new_kinds = dict(old), dict(new)
        for key in old_kinds | new_kinds:
            if key not in old_kinds or key not in new_kinds:
                return f"group {index} has {key!r}" + (" no more" if key in old_kinds else " now")
            if old_kinds[key] != new_kinds[key]:
                return f"{key!r} of group {index} is {new_kinds[key]!r} and was {old_kinds[key]!r}"
    return "its entries are in another order"


_FIXED = (int, float, str, bool, tuple, type(None))


def _kind(value: Any) -> Any:
    """The part of a hyper-parameter that a graph depends on: everything but numbers, which are inputs."""
    if type(value) in (int, float):
        return type(value)
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, tuple) and all(type(v) in (int, float) for v in value):
        return tuple(map(type, value))
    return value if isinstance(value, (bool, str, type(None))) else type(value)


def has_step_of_its_own(optimizer: Any) -> bool:
    """Whether the instance has another ``step`` than its class.

    A scheduler does so too, to count calls: that one wraps the class's own, which torch itself wraps for profiling.
    """
    step: Any = vars(optimizer).get("step")
    return step is not None and _innermost(step) is not _innermost(type(optimizer).step)


def _innermost(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(function, "__func__", function)


_READ_VALUES = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SparseAdam)
"""What these do next depends on values that they compute, or on the layout of gradients."""
_ABOUT_CLASSES = {"__init__", "__repr__", "__module__", "__doc__", "__annotations__", "__dict__", "__weakref__"}


def is_torchs_own(optimizer: Any) -> bool:
    """Whether the code of an optimizer's step is torch's own. Other steps run in Python in each step.

    A subclass may have attributes and an ``__init__`` of its own.
    """
    kinds = type(optimizer).__mro__
    torchs = next((kind for kind in kinds if kind.__module__.startswith("torch.optim.")), Optimizer)
    if torchs is Optimizer or issubclass(torchs, _READ_VALUES) or has_step_of_its_own(optimizer):
        return False
    own = {name: value for kind in kinds[: kinds.index(torchs)] for name, value in vars(kind).items()}
    return all(  # torch puts a wrapped ``step`` on classes
        name in _ABOUT_CLASSES or not hasattr(torchs, name) or _innermost(value) is _innermost(getattr(torchs, name))
        for name, value in own.items()
    )


_OF_ALL = {"param_groups", "state", "step", "_opt_called"}


def own_values(optimizer: Any) -> frozenset[tuple[str, Any]]:
    """Attributes of a user's optimizer beside groups and state: plain values, and identities of objects.

    By where they are; a step that is captured once finds them as they were then.
    """
    if is_torchs_own(optimizer):
        return frozenset()
    found: set[tuple[str, Any]] = set()

    def look(place: str, value: Any, depth: int) -> None:
        if isinstance(value, (dict, list, tuple)) and depth < _DEEPEST:
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                look(f"{place}[{key!r}]", part, depth + 1)
        else:
            found.add((place, repr(value) if isinstance(value, (int, float, complex, str, bytes)) else id(value)))

    for name, value in vars(optimizer).items():
        if name not in _OF_ALL and not name.startswith("_optimizer_"):
            look(name, value, 0)
    return frozenset(found)


_DEEPEST = 4


def swaps_of(optimizers: Sequence[Optimizer], names: dict[int, str], inputs: InputTable) -> list[OptimizerSwap]:
    """Several optimizers on fake tensors; a group's number is that among the groups of all."""
    swaps: list[OptimizerSwap] = []
    for optimizer in optimizers:
        groups = sum(len(swap.optimizer.param_groups) for swap in swaps)
        swaps.append(OptimizerSwap(optimizer, names, inputs, groups))
    return swaps


def check_step(optimizer: Optimizer) -> None:
    """Check ``step`` if it is a function of the instance: a scheduler's counter is left out, the user's cannot be.

    Raises:
        CaptureError: it is the user's.
    """
    if has_step_of_its_own(optimizer):
        raise CaptureError(
            f"optimizer.step was replaced on the {type(optimizer).__name__} itself; override `step` in a subclass"
        )
