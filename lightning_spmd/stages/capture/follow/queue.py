"""``self.log`` and metric calls of a step: queued with placeholders, executed when the graph has run.

``log`` of every LightningModule and ``update``, ``forward``, ``compute``, ``reset`` of every metric are shadowed on the
*instances* for the length of a step. No class is patched, and callbacks, which hold their own ``log``, are untouched.
If the step uses a metric's value for this batch, the graph computes it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.ir.steps import CallRef, OutputRef, RecordedCall
from lightning_spmd.ir.tree import map_leaves
from lightning_spmd.stages.capture.follow.tripwires import is_tripwire, reference_to
from lightning_spmd.stages.capture.user_code import user_location

METHODS = private.METHODS
_OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "floordiv", "rfloordiv", "mod",
    "rmod", "matmul", "rmatmul", "neg", "abs", "round", "lt", "le", "gt", "ge", "eq", "ne", "getitem", "len", "iter",
    "bool", "float", "int", "index", "format", "repr", "str",
)  # fmt: skip


class MetricResult:
    """The result of a metric: known when the queue is processed, or computed on use.

    Args:
        reference: to the queued call.
        now: computes it.
    """

    is_tree_leaf = True

    def __init__(self, reference: CallRef, now: Callable[[], Any]) -> None:
        vars(self).update(_reference=reference, _now=now, _value=None)

    def known(self) -> Any:
        """The value."""
        own = vars(self)
        if own["_value"] is None:
            if own["_now"] is None:
                raise CaptureError(
                    "the value of a metric is looked at when its step's Python is over and the graph has not run, as a "
                    "buffer is: register value + 0 instead, which the step computes"
                )
            found = own["_now"]()
            own["_value"] = found if own["_value"] is None else own["_value"]
        return own["_value"]

    def becomes(self, results: Sequence[Any]) -> None:
        """The queue was processed with these results."""
        reference = vars(self)["_reference"]
        found = results[reference.position]
        vars(self)["_value"] = found if reference.key is None else found.get(reference.key)

    def __getattr__(self, name: str) -> Any:
        if name in ("detach", "clone", "cpu") and vars(self)["_value"] is None:  # of what is logged next, or used
            return lambda: MetricResult(vars(self)["_reference"], lambda: getattr(self.known(), name)())
        return getattr(self.known(), name)

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """What it is to ``isinstance``; in the step a tensor, which most metrics give."""
        value = vars(self)["_value"]
        return self._likely if value is None else type(value)

    _likely: type = Tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.known().__reduce_ex__(protocol)

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(known, args), **{name: known(value) for name, value in (kwargs or {}).items()})


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: MetricResult, *others: Any) -> Any:
        return getattr(type(self.known()), name)(self.known(), *map(known, others))

    return apply


for _name in _OPERATORS:
    setattr(MetricResult, f"__{_name}__", _operator(f"__{_name}__"))


def known(value: Any) -> Any:
    """A metric's value as the tensor that it is, also in a list or tuple; anything else as it is."""
    if issubclass(type(value), MetricResult):  # isinstance would ask what stands for a rank's own for its class
        return value.known()
    if type(value) in (list, tuple) and any(issubclass(type(item), MetricResult) for item in value):
        return type(value)(map(known, value))
    return value


class Shadows:
    """What is shadowed on a module's parts, found once.

    Args:
        root: the LightningModule.

    Attributes:
        metrics: those of the modules and in their containers, each with its path if it is a module's.
        modules: LightningModules, with their paths.
        computing: metrics whose values steps compute with, which are the steps' own Python from then on.
    """

    def __init__(self, root: nn.Module) -> None:
        self.computing: list[Any] = []
        self._parts: dict[int, list[Any]] = {}
        self.metrics: list[tuple[Any, Any]] = []
        self.modules: list[tuple[str, Any]] = []
        for path, part in root.named_modules():
            if _is_metric(part):
                self.metrics.append((path, part))
            elif callable(getattr(type(part), "log_dict", None)) and hasattr(part, "automatic_optimization"):
                self.modules.append((path, part))
        known = {id(metric) for _, metric in self.metrics}
        for part in root.modules():
            if not _is_metric(part):
                inside = [m for m in _in_containers(part) if id(m) not in known]
                known |= set(map(id, inside))
                self.metrics += [(m, m) for m in inside]
        self._parts = {id(metric): _with_states(metric) for _, metric in self.metrics}

    def computes(self, metric: Any) -> None:
        """The step computes with the result of a metric."""
        self.computing += _parts_of(metric)

    def with_states(self, metric: Any) -> list[Any]:
        """The metric and those of which it is made, as far as they have something that its calls change."""
        found = self._parts.get(id(metric))  # one that the step has made is not known
        return _with_states(metric) if found is None else found


class MetricResults(MetricResult, Mapping[str, MetricResult]):  # type: ignore[misc]
    """The results of a collection of metrics, by name.

    Args:
        reference: to the queued call.
        now: computes it.
        names: of the values, as the collection itself would name them.
        result: makes one value.
        are_all: whether these are all names; else the values have others, too.
    """

    def __init__(
        self,
        reference: CallRef,
        now: Callable[[], Any],
        names: Iterable[str],
        result: Callable[[CallRef, Callable[[], Any]], MetricResult],
        *,
        are_all: bool,
    ) -> None:
        super().__init__(reference, now)

        def entry(name: str) -> Callable[[], Any]:
            return lambda: named_value(self.known(), name)

        vars(self)["_named"] = {name: result(CallRef(reference.position, name), entry(name)) for name in names}
        vars(self)["_are_all"] = are_all

    _likely = dict

    def _held(self) -> Mapping[str, Any]:
        value = vars(self)["_value"]
        return vars(self)["_named"] if value is None else value

    def _listed(self) -> Mapping[str, Any]:
        return self._held() if vars(self)["_are_all"] else self.known()

    def __getitem__(self, name: str) -> Any:
        held = self._held()
        # a metric may give a dictionary, whose names nobody knows before
        return held[name] if name in held else self.known()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed())

    def __len__(self) -> int:
        return len(self._listed())

    def __contains__(self, name: object) -> bool:
        return name in self._listed()

    def __bool__(self) -> bool:
        return bool(self._held())

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__
    keys, values, items, get = Mapping.keys, Mapping.values, Mapping.items, Mapping.get


def named_value(found: Mapping[str, Any], name: str) -> Any:
    """One of the values that a collection of metrics gives.

    Raises:
        CaptureError: a metric of the collection returns a dictionary, so that its values have other names.
    """
    if name in found:
        return found[name]
    raise CaptureError(
        f"a collection of metrics has no value {name!r} but {', '.join(map(repr, found))}: a metric in it returns "
        "a dictionary. Log all of them with self.log_dict(self.collection(...))"
    )


@contextlib.contextmanager
def metrics_unseen() -> Iterator[None]:
    """Metrics made inside are not the step's: Lightning keeps each logged value in one of its own."""
    before, private.UNSEEN.on_metric = private.UNSEEN.on_metric, None
    try:
        yield
    finally:
        private.UNSEEN.on_metric = before


class _Logged(Mapping[str, Any]):
    """Metrics of the Trainer in a step that has queued more of them.

    Args:
        known: those that are there.
        names: with which names of those that are not begin; None: unknown.
        logs: makes the calls, and gives all.
    """

    def __init__(self, known: Mapping[str, Any], names: tuple[str, ...] | None, logs: Callable[[], Any]) -> None:
        self._known, self._names, self._logs = known, names, logs

    def __getitem__(self, key: str) -> Any:
        late = self._names is None or str(key).startswith(self._names)
        return (self._logs() if late else self._known)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._logs())

    def __len__(self) -> int:
        return len(self._logs())

    def __repr__(self) -> str:
        return repr(self._logs())


class LoggedAtOnce:
    """What a step has logged already, in case its Python runs a second time: it is logged once."""

    def __init__(self) -> None:
        self._logged: list[tuple[Any, str]] = []
        self._before: list[tuple[Any, str]] = []

    def is_repeated(self, module: Any, name: str) -> bool:
        """Whether the step logs something that it has logged before it began again."""
        if self._before and (module, name) in self._before:
            self._before.remove((module, name))
            return True
        self._logged.append((module, name))
        return False

    def begin_again(self) -> None:
        """The step's Python runs again."""
        self._before, self._logged = self._before + self._logged, []

    def end(self) -> None:
        """The step is over."""
        self._before.clear()
        self._logged.clear()

    def __bool__(self) -> bool:
        return bool(self._before)


class Queue:
    """The calls of one step.

    Args:
        shadows: of the module.
        want: makes a tensor of the step a wanted result, told as it is now, and gives its position; of others a copy.
        run_for_good: lets the step go on eagerly, for a reason.
        beside: entered around calls of Lightning's that are none of the step's.

    Attributes:
        is_open: whether calls are queued; else they are made at once.
        logs_at_once: whether what is logged first, and no tensor, is logged where the step logs it.
        at_once: what has been logged so.
        log_now: makes a call of ``log`` at once, given the module and the arguments.
        part: on several ranks, what of a tensor a metric of this rank takes that is not queued.
        has_ranks: metrics of several ranks have a part of the rows each, also those that the step makes.
        is_own: values are those of a rank's own batch, and become all ranks': numbers are queued like others.
        rows: ``batch_size=`` of the first ``self.log`` that has it.
        logged: has what was logged, which the step may read: its attribute ``on_read`` gives it then.
    """

    def __init__(
        self,
        shadows: Shadows,
        want: Callable[[Tensor, OutputRole], int | Tensor],
        run_for_good: Callable[[str], None],
        beside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._beside = beside
        self.calls: list[RecordedCall] = []
        self.is_open = self.logs_at_once = True
        self.at_once = LoggedAtOnce()
        self.log_now: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] = _log
        self.part: Callable[[Any], Any] | None = None
        self.is_own = self.has_ranks = False
        self.rows: Any = None
        self.logged: Any = None
        self._results: list[MetricResult] = []
        self._of_batch: set[int] = set()
        """Positions of calls that give the value of a batch."""
        self._shadows, self._want, self._run_for_good = shadows, want, run_for_good
        self._before: list[tuple[Any, str, Any]] = []
        self._held: list[private.HeldBack] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Calls inside are queued."""
        for path, module in self._shadows.modules:
            if "log" not in vars(module):  # which somebody else has put there
                self._put(module, "log", self._log(path, module))
                self._put(module, "log_dict", self._log_dict(path, module))
        for path, metric in self._shadows.metrics:
            if not any(metric is other for other in self._shadows.computing):
                self._shadow(path, metric)
        if self.logged is not None:
            self._put(self.logged, "on_read", self._read)
        private.UNSEEN.on_metric = self._made if self.has_ranks else None
        try:
            yield
        finally:
            private.UNSEEN.on_metric = None
            self._give_back()
            while self._before:
                owner, name, value = self._before.pop()
                if value is _ABSENT:
                    owner.pop(name, None)
                else:
                    owner[name] = value

    def _shadow(self, path: Any, metric: Any) -> None:
        private.MISSES.tell_of(type(metric))
        for method in METHODS:
            self._put(metric, method, self._metric(path, metric, method))

    def _made(self, metric: Any) -> None:
        """Metrics that the step makes are queued, too."""
        if "update" not in [name for owner, name, _ in self._before if owner is vars(metric)]:
            self._shadow(metric, metric)

    def _put(self, instance: Any, name: str, replacement: Any) -> None:
        attributes = vars(instance)
        self._before.append((attributes, name, attributes.get(name, _ABSENT)))
        attributes[name] = replacement

    def _hold_back(self, name: str, metric: Any) -> None:
        """What the queued call of a metric changes is as it was: whoever looks at it is a reader of the step."""
        for part in self._shadows.with_states(metric):
            if type(vars(part)) is not private.HeldBack:
                private.MISSES.tell_of(type(part))
                self._held.append(private.HeldBack(part, functools.partial(self._looked_at, name, metric)))

    def _looked_at(self, name: str, metric: Any) -> None:
        if not private.UNSEEN.is_here():  # another thread is at no place of the step
            return
        self._give_back()
        if not self.has_ranks:
            self._shadows.computes(metric)
        self._run_for_good(f"metric {name!r} is looked at behind a call of it")

    def _give_back(self) -> None:
        held, self._held = self._held, []
        for one in held:
            one.give_back()

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        """Inside, metrics are looked at as they were before the queued calls."""
        held = self._held
        for one in held:
            one.give_back()
        try:
            yield
        finally:
            for one in held if self._held is held else ():  # else the step runs eagerly
                one.hold()

    def close(self) -> list[RecordedCall]:
        """Stop queueing. Returns the queued calls."""
        self._give_back()
        self.is_open, calls, self.calls = False, self.calls, []
        return calls

    def waiting(self) -> tuple[tuple[str, str], ...]:
        """The calls of metrics in which ranks wait for each other, by metric and method."""
        return tuple(
            (call.target if isinstance(call.target, str) else type(call.target).__name__, call.method)
            for call in self.calls
            if call.method in ("forward", "compute")
        )

    def let_go(self) -> None:
        """Python is done. Arguments of metrics that were kept for early values are released."""
        for result in self._results:
            vars(result)["_now"] = None

    def worked_off(self, results: Sequence[Any]) -> None:
        """The step goes on eagerly, and the calls were made, with these results.

        Of several ranks each has updated its metrics with its own rows. What the step may compute with is the value of
        the whole batch nevertheless, and of all of it that value has a gradient.
        """
        if not self.has_ranks:
            self.done(results)
            return
        for result in self._results:
            if vars(result)["_reference"].position in self._of_batch:
                result.known()
            else:
                result.becomes(results)

    def done(self, results: Sequence[Any]) -> None:
        """The calls were made, with these results."""
        for result in self._results:
            result.becomes(results)

    def record(self, target: Any, method: str, role: OutputRole, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Remember one call; gives its position."""

        def leaf(_: str, value: Any) -> Any:
            if is_tripwire(value):
                return reference_to(value)
            if isinstance(value, MetricResult):
                return vars(value)["_reference"] if vars(value)["_value"] is None else leaf("", vars(value)["_value"])
            found = self._want(value, role) if isinstance(value, Tensor) else value
            return OutputRef(found) if isinstance(value, Tensor) and type(found) is int else found

        source = (user_location() or "") if self.is_own else ""
        call = RecordedCall(target, method, map_leaves(leaf, args), map_leaves(leaf, kwargs), source)
        self.calls.append(call)
        return len(self.calls) - 1

    def _log(self, path: str, module: Any) -> Callable[..., None]:
        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            self.rows = kwargs.get("batch_size") if self.rows is None else self.rows
            if not self.is_open:
                with metrics_unseen():
                    self.log_now(module, (name, known(value), *args), kwargs)
                return
            if isinstance(value, Tensor) and not isinstance(value, MetricResult) and value.numel() != 1:
                raise ValueError(
                    f"`self.log({name}, {tuple(value.shape)} tensor)` was called, but the tensor must have one element"
                )
            at_once = self.logs_at_once and not self.calls and not self.is_own  # the step may ask for it
            if at_once and not isinstance(value, (Tensor, MetricResult, Metric)):
                with self._beside(), metrics_unseen():
                    if not self.at_once.is_repeated(module, name):
                        self.log_now(module, (name, value, *args), kwargs)
                return
            self.record(path, "log", OutputRole.LOGGED, (name, value, *args), kwargs)

        return log

    def _read(self, read: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        calls = [call for call in self.calls if call.method in ("log", "log_dict")] if self.is_open else []
        if not calls:
            return read()
        names = [call.args[0] if call.args and call.method == "log" else call.kwargs.get("name") for call in calls]

        def logs() -> Mapping[str, Any]:
            if self.is_open:
                self._run_for_good("it reads metrics of the trainer behind a self.log of its own")
            return read()

        return _Logged(read(), None if None in names else tuple(map(str, names)), logs)

    def _log_dict(self, path: str, module: Any) -> Callable[..., None]:
        def log_dict(dictionary: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(dictionary, MetricResult) and self.is_open:  # with the names that it will have
                self.record(path, "log_dict", OutputRole.LOGGED, (dictionary, *args), kwargs)
                return
            dictionary = known(dictionary)
            with self._unseen():  # it has its metrics logged one by one
                type(module).log_dict(module, dictionary, *args, **kwargs)

        return log_dict

    def _metric(self, path: Any, metric: Any, method: str) -> Callable[..., Any]:
        own = getattr(metric, method)
        name = path if isinstance(path, str) else type(metric).__name__

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.is_open:
                given = map_leaves(lambda _, value: known(value), (args, kwargs))
                parts = given if self.part is None else map_leaves(lambda _, value: self.part(value), given)  # type: ignore[misc]
                found = own(*parts[0], **parts[1])
                if method != "forward" or self.part is None or self.is_own:
                    return found
                return _of_this_batch(metric, *given, syncs=False)  # which the step may compute with
            position = self.record(path, method, OutputRole.METRIC_INPUT, args, kwargs)
            self._hold_back(name, metric)
            if method not in ("forward", "compute"):
                return None
            grad, is_of_batch = torch.is_grad_enabled(), method == "forward"
            if is_of_batch:
                self._of_batch.add(position)
                # the step may write into them before it computes with the value; what nobody uses is no part of a graph
                args, kwargs = map_leaves(lambda _, v: v.clone() if isinstance(v, Tensor) else v, (args, kwargs))

            def now() -> Any:
                # on one device the parts of one draw random numbers, as eager's do, once
                with self._unseen():
                    if is_of_batch and (self.has_ranks or not _has_parts(metric)):
                        with torch.set_grad_enabled(grad):
                            return _of_this_batch(metric, args, kwargs, syncs=self.is_own)
                    if not self.has_ranks:
                        self._shadows.computes(metric)
                value = "the value" if is_of_batch else "what compute() gives, not the batch's value,"
                self._run_for_good(f"{value} of metric {name!r} is used in the step")
                return None

            if isinstance(metric, MetricCollection):
                with self._unseen():
                    names, are_all = map(str, metric.keys(keep_base=False)), not _names_its_own(metric.children())
                self._results.append(MetricResults(CallRef(position), now, names, self._result, are_all=are_all))
                return self._results[-1]
            return self._result(CallRef(position), now)

        return call

    def _result(self, reference: CallRef, now: Callable[[], Any]) -> MetricResult:
        self._results.append(MetricResult(reference, now))
        return self._results[-1]


_ABSENT = object()


def _log(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    type(module).log(module, *args, **kwargs)


def wanted_by(call: RecordedCall) -> list[int]:
    """Which wanted results a queued call takes."""
    found: list[int] = []

    def leaf(_: str, value: Any) -> Any:
        if type(value) is OutputRef:
            found.append(value.position)
        return value

    map_leaves(leaf, (call.args, call.kwargs))
    return found


def _of_this_batch(
    metric: Metric | MetricCollection, args: tuple[Any, ...], kwargs: dict[str, Any], *, syncs: bool
) -> Any:
    """The value of a metric for this batch alone.

    Args:
        metric: it is left as it is.
        args: of its ``forward``.
        kwargs: likewise.
        syncs: whether it asks other ranks where the user says so; else the batch is that of all ranks.
    """
    fresh = _copied(metric, {})
    for part in _parts_of(fresh):
        if isinstance(part, Metric):
            settings = vars(part)
            settings["sync_on_compute"] = settings["_to_sync"] = False  # a wrapper asks its metric for compute()
            settings["dist_sync_on_step"] = syncs and settings["dist_sync_on_step"]
    type(metric).reset(fresh)  # of several ranks each has a history of its own
    return type(metric).forward(fresh, *map(known, args), **{k: known(v) for k, v in kwargs.items()})


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """A metric, the metrics of which it is made, and their containers anew; everything else is shared.

    Args:
        value: a metric, or what one has.
        copies: those made already, by ``id`` of what they are of.
    """
    if id(value) in copies:
        return copies[id(value)]
    if _is_metric(value) or (isinstance(value, nn.Module) and any(map(_is_metric, value.modules()))):
        fresh: Any = object.__new__(type(value))  # copy.copy makes torchmetrics print a metric, and that reads tensors
        copies[id(value)] = fresh
        fresh.__setstate__(_state_of(value, copies))
        return fresh
    if type(value) is tuple:
        return tuple(_copied(inside, copies) for inside in value)
    if not isinstance(value, (list, dict, set)):
        return value
    found = copies[id(value)] = copy.copy(value)  # a reset may empty it in place, and the metric itself keeps it
    if not isinstance(found, set):
        for key, inside in list(found.items()) if isinstance(found, dict) else enumerate(found):
            found[key] = _copied(inside, copies)
    return found


def _state_of(module: nn.Module, copies: dict[int, Any]) -> dict[str, Any]:
    """The attributes of a copy."""
    found = dict(module.__getstate__())
    if _is_metric(module):
        for name in METHODS:  # the step's shadows
            found.pop(name, None)
    if isinstance(module, Metric):  # a batch begins without what others have left
        found |= {name: [] for name, state in module.metric_state.items() if isinstance(state, list)}
    return {name: _copied(value, copies) for name, value in found.items()}


def _is_metric(value: Any) -> bool:
    return isinstance(value, (Metric, MetricCollection))


def _parts_of(metric: Metric | MetricCollection) -> list[Any]:
    """The metric, and those of which it is made."""
    return [metric, *(part for part in metric.modules() if part is not metric), *_in_containers(metric)]


def _with_states(metric: Any) -> list[Any]:
    # a collection itself has none, and the step may walk through it
    return [part for part in _parts_of(metric) if _is_metric(part) and type(part) is not MetricCollection]


def _has_parts(metric: Any) -> bool:
    inside: list[Any] = [*list(metric.modules())[1:], *vars(metric).values()]
    return bool(_in_containers(metric)) or any(map(_is_metric, inside))


def _names_its_own(collection: Iterable[Any]) -> bool:
    """Whether a metric of a collection says that its value is a dictionary: the value alone has the names then."""
    said = [getattr(type(metric).compute, "__annotations__", {}).get("return") for metric in collection]
    return any(word in str(one).lower() for one in said for word in ("dict", "mapping"))


def _in_containers(owner: Any) -> list[Any]:
    """Metrics in plain lists and dictionaries of an object."""
    found: list[Any] = []
    for value in vars(owner).values():
        if type(value) in (list, tuple, dict):
            inside = value.values() if type(value) is dict else value
            found += [item for item in inside if _is_metric(item)]
    return found
