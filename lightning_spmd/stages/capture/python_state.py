"""Python state that a step reads or changes: nothing of it may be baked into the graph silently.

Three observers work while a step is captured: the attribute spy (modules), the walk from the user's frames (everything
else) and the Trainer's view. What they saw becomes a :class:`StateGuard`, tensors among it are read anew each step by
their place, and what the step changed is undone and named.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.messages import batch_hook
from lightning_spmd.stages.capture.attribute_spy import AttributeSpy
from lightning_spmd.stages.capture.code_facts import facts_of
from lightning_spmd.stages.capture.containers import Content
from lightning_spmd.stages.capture.contents import MOST_BYTES, bytes_of_tensor
from lightning_spmd.stages.capture.draws import Draws
from lightning_spmd.stages.capture.frames import FrameWatch
from lightning_spmd.stages.capture.holders import (
    CANNOT_BE_PUT,
    Attributes,
    ClassAttributes,
    Entry,
    Fields,
    Globals,
    Holder,
    Variables,
)
from lightning_spmd.stages.capture.host_scalar import Number, scalar_of
from lightning_spmd.stages.capture.kinds import BOOKKEEPING, TORCH_INTERNALS
from lightning_spmd.stages.capture.module_effects import module_unchanged
from lightning_spmd.stages.capture.same_state import is_simple
from lightning_spmd.stages.capture.side_effects import Effect, is_of_capture, undo_effects
from lightning_spmd.stages.capture.sightings import EMPTY, Sightings
from lightning_spmd.stages.capture.state_guard import StateGuard
from lightning_spmd.stages.capture.trainer_view import TrainerView
from lightning_spmd.stages.capture.user_code import is_user_class, user_location
from lightning_spmd.stages.capture.walk import Walk

_OF_A_RANK = ("is_global_zero", "global_rank", "local_rank", "node_rank")
_TABLES = ("_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class PythonState:
    """What one capture sees and does to Python state.

    Args:
        module: the LightningModule.
        optimizer: its optimizer, or None.
        trainer: the real Trainer.
        twin_of: the fake twin of a live parameter or buffer; None for other tensors.
        host_value: makes a number a graph input: ``(name, value) -> SymInt``.
        has_logged: whether the step called ``self.log`` already.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        trainer: Any,
        twin_of: Callable[[Tensor], Tensor | None],
        host_value: Callable[[str, Number], Any],
        has_logged: Callable[[], bool],
    ) -> None:
        self.module, self.optimizer = module, optimizer
        self.effects: list[Effect] = []
        self._moving: list[Entry] = []
        self._temporary: list[tuple[Any, Any]] = []
        self.spy = AttributeSpy(module)
        self.draws = Draws(host_value)
        self.sightings = Sightings(module, optimizer)
        self.walk = Walk(self.sightings, twin_of, self._hidden_module)
        self.watch = FrameWatch(self.walk)
        self.watch.builtins.functions = self.draws.functions
        self._trainer = self.sightings.root(Fields, trainer, "trainer")
        self.view = TrainerView(trainer, host_value, self._see_of_trainer, has_logged, self.see_loggers)
        self.on_rank: Callable[[str], None] = lambda _: None
        self.on_loggers: Callable[[Sequence[Any]], None] = lambda _: None

    # ------------------------------------------------------------------ while capturing
    @contextlib.contextmanager
    def following(self, moving: Mapping[str, Entry], host_value: Callable[[str, Number], Any]) -> Iterator[None]:
        """Recorded numbers are in these places instead of plain ones."""
        before: list[tuple[Entry, Any]] = []
        try:
            for path, place in moving.items():
                value = place.found_again().read()
                if type(value) in (int, float):
                    outermost = place.outermost()
                    whole = outermost.read()
                    try:
                        place.put(host_value(path, value))
                    except CANNOT_BE_PUT as error:
                        raise CaptureError(f"nothing else can be put in its place ({error})") from error
                    before.append((outermost, whole))
                    self._temporary += _pairs(outermost.read(), whole)
                    self._moving.append(place)
            yield
        finally:
            for outermost, value in reversed(before):
                outermost.put(value)
            for place in self._moving:
                place.found_again()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """What the step does to modules is undone, and in ``effects`` then; a draw of Python's is an error."""
        with module_unchanged(self.module, self.watch.codes) as found:
            yield
        self.effects = [*found, *self.effects]

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Reads are noted; what the step does to anything that was seen is undone, and is in ``effects`` then."""
        try:
            with self.draws.followed(self.module), self.spy.active():
                yield
        finally:
            self.effects = undo_effects(self.sightings)

    def _hidden_module(self, module: nn.Module) -> None:
        for part in module.modules():
            self.spy.add(part)

    def _see_of_trainer(self, name: str) -> Entry:
        if name in _OF_A_RANK and self._trainer.subject.world_size > 1:
            self.on_rank(user_location() or "")
        with private.disable_dispatch_modes():  # some properties compute
            entry = self._trainer.see(name)
        if not is_simple(entry.value):
            self.sightings.places[id(entry.value)] = entry
        return entry

    @property
    def loggers(self) -> Sequence[Any]:
        """Those that the Trainer has."""
        return getattr(self._trainer.subject, "loggers", None) or ()

    def see_loggers(self, name: str = "logger") -> Any:
        """The Trainer's loggers, for which the graph holds from now on."""
        trainer = self._trainer.subject
        holder = self.sightings.holder(Content, trainer, "trainer.loggers", None, read=_loggers_of)
        holder.root = True
        with private.disable_dispatch_modes():
            holder.see("")
        self.on_loggers(trainer.loggers)
        return trainer.logger if name == "logger" else list(trainer.loggers)

    def see_attribute(self, owner: Any, path: str, names: Sequence[str]) -> Any:
        """What an object that lasts has at the end of some attributes, for which the graph holds from now on."""
        place = self.sightings.places.get(id(owner))
        holder = self.sightings.holder(Fields, owner, path, place)
        holder.root = holder.root or place is None
        for name in names[:-1]:
            entry = holder.see(name)
            holder = self.sightings.holder(Fields, entry.value, entry.path, entry)
        return holder.see(names[-1]).value

    # ------------------------------------------------------------------ afterwards
    def guard(self, forgotten: Iterable[tuple[str, str]]) -> StateGuard:
        """The guard of everything that was seen.

        Args:
            forgotten: attributes that are no part of it, as path of the module and name.
        """
        self.walk.is_capturing = False
        self._put_back()
        self.spy.forget(forgotten)
        for path, module in self.spy.modules:
            self._see_reads(path, module)
        self._see_switches()
        self._see_on_tensors()
        for name, table in private.global_forward_hooks().items():
            self.walk.follow(self.sightings.root(Globals, {name: table}, "torch.nn.modules.module").see(name), EMPTY)
        if self.optimizer is not None:
            for index, group in enumerate(self.optimizer.param_groups):
                holder = self.sightings.root(Variables, group, f"optimizer.param_groups[{index}]")
                for key in [k for k, v in group.items() if k != "params" and not is_simple(v)]:
                    self.walk.follow(holder.see(key), EMPTY)
        entries = [e for holder in self._guarded() for e in self._entries(holder)]
        kept = set(entries)
        containers = [h for h in self._guarded() if h.complete and all(e in kept for e in h.entries.values())]
        moving = {(id(place.holder.subject), place.key) for place in self._moving}
        free = [entry for entry in entries if (id(entry.holder.subject), entry.key) in moving]
        places = (entries for entries in self.sightings.tensors.values() if len(entries) > 1)
        return StateGuard(
            [e for e in entries if not e.holder.complete or e.holder in set(containers)],
            containers,
            [entry for several in places for entry in several],
            free,
            self.sightings.untold,
        )

    def _see_switches(self) -> None:
        """What functions of torch told the step: asked here, outside of its ``no_grad`` and the like."""
        for function in self.watch.getters.values():
            with contextlib.suppress(Exception):  # those that need arguments
                if is_simple(function()):
                    path = f"{function.__module__}.{function.__name__}()"
                    holder = self.sightings.holder(Content, function, path, None, read=_called)
                    holder.root = True
                    holder.see("")

    def _see_on_tensors(self) -> None:
        """What users hang on parameters and buffers, and the step's code names."""
        names = frozenset[str]().union(*(facts_of(code).names for code in self.watch.codes))
        for path, (table, key) in private.tensor_slots(self.module).items():
            tensor = table[key]
            if tensor is not None and (named := names & vars(tensor).keys() - private.NAMES_OF_DTENSORS):
                holder = self.sightings.root(Attributes, tensor, path)
                for name in named:
                    self.walk.follow(holder.see(name), EMPTY)

    def _put_back(self) -> None:
        """What was put in place of plain numbers, and of tuples with them, is gone."""
        real = {id(temporary): value for temporary, value in self._temporary}
        for holder in self.sightings.holders:
            holder.subject = real.get(id(holder.subject), holder.subject)
            for entry in holder.entries.values():
                entry.value = real.get(id(entry.value), entry.value)

    def content_of(self, tensor: Tensor) -> None:
        """The step takes a tensor's values as Python numbers (``tolist``, ``numpy``): they are guarded.

        Raises:
            CaptureError: it is too large.
        """
        if tensor.nbytes > MOST_BYTES:
            raise CaptureError(
                f"a tensor of {tensor.nbytes} bytes is read as Python values (tolist, numpy), which would be the same "
                f"for ever; keep it a tensor, or move the read to {batch_hook('start')}",
                user_location(),
            )
        places = self.sightings.tensors.get(id(tensor))
        place = places[0] if places else None
        path = "a tensor that is read as Python values" if place is None else place.path
        holder = self.sightings.holder(Content, tensor, path, place, read=bytes_of_tensor)
        holder.root = place is None
        with private.disable_dispatch_modes():
            holder.see("")

    def see_metric(self, path: str, metric: Metric) -> None:
        """The graph computes what a metric gives: what it is set to is guarded, what it has counted is not."""
        holder = self.sightings.root(Attributes, metric, path)
        for name, value in list(vars(metric).items()):
            counted = name.startswith("_") or name in BOOKKEEPING or name in metric.metric_state
            if not counted and (is_simple(value) or isinstance(value, Tensor)):
                self.walk.follow(holder.see(name), EMPTY)

    def _see_reads(self, path: str, module: nn.Module) -> None:
        """Turn what the spy noted of one module into entries."""
        if id(module) in self.sightings.modules:
            self.sightings.root(Attributes, module, path or "self")
        holder = self.sightings.holder(Attributes, module, path, None)
        of_torch = type(module).__module__.startswith("torch.")
        for name in sorted(self.spy.reads[id(module)] - BOOKKEEPING):
            if name in _HOOKS:
                self.walk.follow(holder.see(name), EMPTY)
            elif name in TORCH_INTERNALS or name.startswith("__") or (name.startswith("_") and of_torch):
                continue
            elif name in module.__dict__:
                self.walk.follow(holder.see(name), EMPTY)
            else:
                self._see_elsewhere(module, holder, name)

    def _see_elsewhere(self, module: nn.Module, holder: Holder, name: str) -> None:
        """An attribute that is not in the module's ``__dict__``: a tensor, a submodule, a class's, or none."""
        kinds = type(module).__mro__[:-1]
        on_class = [kind for kind in kinds if name in vars(kind)]
        tables = [module.__dict__[table] for table in ("_parameters", "_buffers", "_modules")]
        if not on_class and any(table.get(name) is not None for table in tables):
            return
        holder.see(name)
        for kind in kinds:
            if is_user_class(kind):
                self.sightings.root(ClassAttributes, kind, kind.__qualname__).see(name)
            if kind in on_class:
                return
        for table in tables:
            self.sightings.root(Globals, table, holder.path).see(name)

    def _guarded(self) -> list[Holder]:
        return [h for h in self.sightings.holders if h.guarded and self.sightings.may_last(h) and not _is_temporary(h)]

    def _entries(self, holder: Holder) -> Iterator[Entry]:
        reads = self.spy.reads.get(id(holder.subject)) if isinstance(holder, Attributes) else None
        for entry in holder.entries.values():
            value = entry.value
            if reads is not None and entry.key not in reads and entry.key not in _TABLES:
                continue
            if isinstance(value, private.FakeTensor) or scalar_of(value) is not None:
                continue
            if holder is self._trainer and not (is_simple(value) or isinstance(value, Tensor) or entry.inside):
                continue
            if any(_is_temporary(inside) for inside in entry.inside) or is_of_capture(value):
                continue
            if not holder.lasts and holder.peek(holder.subject, entry.key) is not value:
                continue  # made by the step, after all
            yield entry

    def host_values(self, moving: Mapping[str, Entry]) -> dict[str, Callable[[], Any]]:
        """Readers of the numbers that are inputs of this graph alone, by name."""
        return {**{path: place.reader() for path, place in moving.items()}, **self.draws.readers}

    def reader_of(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Gives, at each step, the tensor that is in the place where this one was."""
        if (drawn := self.draws.reader_of(tensor)) is not None:
            return drawn
        places = self.sightings.tensors.get(id(tensor))
        return functools.partial(_same, tensor) if not places else places[0].reader()


def _pairs(temporary: Any, value: Any) -> list[tuple[Any, Any]]:
    """What was put somewhere, with what was there; of tuples, each part too."""
    found = [(temporary, value)]
    if isinstance(temporary, tuple):
        found += [
            p for one, other in zip(temporary, value, strict=True) for p in _pairs(one, other) if one is not other
        ]
    return found


def _is_temporary(holder: Holder) -> bool:
    """Whether it holds what exists during the capture alone."""
    values = [e.value for e in holder.entries.values()]
    return holder.complete and any(isinstance(v, private.FakeTensor) or scalar_of(v) is not None for v in values)


def _loggers_of(trainer: Any) -> tuple[int, ...]:
    return tuple(map(id, trainer.loggers))


def _called(function: Callable[[], Any]) -> Any:
    return function()


def _same(tensor: Tensor) -> Tensor:
    return tensor


def tensors_on_other_devices(module: nn.Module, device: Any) -> list[str]:
    """Names of parameters, buffers and plain tensor attributes that are not on ``device``."""
    found = [n for n, t in [*module.named_parameters(), *module.named_buffers()] if t.device.type != device.type]
    for path, part in module.named_modules():
        if isinstance(part, Metric):
            continue
        found += [
            f"{path}.{name}".lstrip(".")
            for name, value in part.__dict__.items()
            if isinstance(value, Tensor) and value.ndim > 0 and value.device.type != device.type
        ]
    return found
