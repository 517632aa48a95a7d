"""Records ``self.log``, ``self.print`` and torchmetrics calls at capture, to be made again after each run.

``log`` and ``print`` of a LightningModule and ``update``/``forward``/``compute``/``reset`` of every metric are shadowed
on the *instances*, so no class is patched and callbacks, which hold their own ``log``, are untouched. Tensors among the
arguments become graph outputs. What a metric returns does not exist before the graph ran (``later_value.py``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.ir.steps import CallRef, OutputRef, RecordedCall
from lightning_spmd.ir.tree import map_leaves
from lightning_spmd.stages.capture.appended_lists import AppendOnly
from lightning_spmd.stages.capture.batch import is_unread, reference_to_leaf
from lightning_spmd.stages.capture.drawn_array import DrawnArray
from lightning_spmd.stages.capture.host_scalar import scalar_of
from lightning_spmd.stages.capture.later_array import LaterArray
from lightning_spmd.stages.capture.later_value import LaterValue, LaterValues, reference_to
from lightning_spmd.stages.capture.logger_calls import LoggerCalls
from lightning_spmd.stages.capture.metric_values import MetricValue, of_this_batch
from lightning_spmd.stages.capture.printed import prints_followed
from lightning_spmd.stages.capture.rank_zero import is_for_rank_zero, rank_zero_functions_run
from lightning_spmd.stages.capture.texts import Texts
from lightning_spmd.stages.capture.user_code import user_location

_KEEP = ("append", "assign")
"""Calls that keep a tensor, and show what is written into it later."""
_METRIC_METHODS = ("update", "forward", "compute", "reset")


class LogRecorder:
    """Collects calls and turns the tensors in them into graph outputs.

    Args:
        add_output: ``(value, role, key, name) -> position`` of the new graph output.
        add_as_it_is: the same of a value as it is now, and whether an array shares its memory.

    Attributes:
        on_metric: told each metric, with its path, whose value for this batch the graph computes itself.
    """

    def __init__(
        self, add_output: Callable[[Any, OutputRole, tuple[Any, ...], str], int], add_as_it_is: Callable[..., int]
    ) -> None:
        self.calls: list[RecordedCall] = []
        self.texts = Texts()
        self.loggers = LoggerCalls(self._function)
        self.on_metric: Callable[[str, Metric], None] = lambda _path, _metric: None
        self._add_output, self._add_as_it_is = add_output, add_as_it_is

    def lift(self, value: Any, role: OutputRole, name: str, add: Callable[..., int] | None = None) -> Any:
        """``value`` with tensors and recorded numbers replaced by references to graph outputs.

        Args:
            value: anything.
            role: of these outputs.
            name: of these outputs.
            add: makes a tensor one; by default as it is when the step ends.

        Raises:
            CaptureError: a tensor of the graph is inside an object that is not a container of ``ir.tree``.
        """

        def leaf(path: str, item: Any) -> Any:
            if is_unread(item):
                return reference_to_leaf(item)
            if isinstance(item, LaterValue):
                return reference_to(item)
            if type(item) is str and (parts := self.texts.parts(item)) is not None:
                return CallRef(self.record("", "text", role, parts, {}))
            if isinstance(item, Tensor):
                return OutputRef((add or self._add_output)(item.detach(), role, (), name + path))
            if scalar_of(item) is not None:
                return OutputRef(self._add_output(item, role, (), name + path))
            if isinstance(item, DrawnArray):
                item.looked_into()
            if isinstance(item, AppendOnly):
                item.looked_at()
            if _hides_tensor(item):
                raise CaptureError(
                    f"{name}{path} is a {type(item).__name__} that holds tensors: only tuples, lists, dicts and "
                    "dataclasses of tensors can leave the graph"
                )
            return item

        return map_leaves(leaf, value)

    def record(self, target: str, method: str, role: OutputRole, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Remember one call; returns its position."""
        name = f"{method} {len(self.calls)}" + (f" of {target}" if target else "")
        shared = method == "numpy" and args[0] == "array"
        as_it_is = functools.partial(self._add_as_it_is, shared=shared)
        add = None if method in _KEEP else as_it_is
        lifted = self.lift(args, role, name, add), self.lift(kwargs, role, name, add)
        call = RecordedCall(target, method, *lifted, user_location() or "", is_for_rank_zero())
        self.calls.append(call)
        return len(self.calls) - 1

    @contextlib.contextmanager
    def active(self, module: nn.Module) -> Iterator[None]:
        """Shadow ``log`` and the metrics' methods below ``module``."""
        with contextlib.ExitStack() as stack:
            for path, part in module.named_modules():
                if isinstance(part, (Metric, MetricCollection)):
                    for method in _METRIC_METHODS:
                        stack.enter_context(_shadow(part, method, self._metric_method(path, part, method)))
                elif callable(getattr(type(part), "log_dict", None)) and hasattr(part, "automatic_optimization"):
                    stack.enter_context(_shadow(part, "log", self._log_method(path)))
                    stack.enter_context(_shadow(part, "log_dict", self._log_dict_method(path, part)))
                    stack.enter_context(_shadow(part, "print", self._print_method(path)))
            stack.enter_context(self.texts.active())
            stack.enter_context(prints_followed(self._function, self.texts.parts))
            stack.enter_context(self.loggers.active())
            stack.enter_context(rank_zero_functions_run())
            yield
            self.texts.check()
            self.loggers.check(self.calls)

    def _function(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        return self.record("", name, OutputRole.LOGGED, args, kwargs)

    def array_of(self, tensor: Tensor) -> LaterArray:
        """What stands for ``tensor.numpy()``."""
        return LaterArray(
            CallRef(self._function("numpy", ("array", tensor), {})), self.made_of, self.texts.mark, tensor
        )

    def made_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LaterArray:
        """What a call gives that is made after the graph ran."""
        return LaterArray(CallRef(self._function("numpy", args, kwargs)), self.made_of, self.texts.mark)

    def _metric_method(self, path: str, metric: nn.Module, method: str) -> Callable[..., Any]:
        def shadow(*args: Any, **kwargs: Any) -> Any:
            call = self.record(path, method, OutputRole.METRIC_INPUT, args, kwargs)
            if method not in ("forward", "compute"):
                return None
            if isinstance(metric, MetricCollection):
                names = [str(name) for name in metric.keys(keep_base=False)]
                return LaterValues(call, path, names, self.made_of, self.texts.mark)
            if method == "compute" or not isinstance(metric, Metric):
                return LaterValue(CallRef(call), path, self.made_of, self.texts.mark)
            now = of_this_batch(metric, args, kwargs, functools.partial(self.on_metric, path))
            return MetricValue(CallRef(call), path, self.made_of, self.texts.mark, now)

        return shadow

    def _log_dict_method(self, path: str, module: Any) -> Callable[..., None]:
        def shadow(dictionary: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(dictionary, LaterValue):  # with the names that it will have: metrics may return dictionaries
                self.record(path, "log_dict", OutputRole.LOGGED, (dictionary, *args), kwargs)
            else:
                type(module).log_dict(module, dictionary, *args, **kwargs)

        return shadow

    def _print_method(self, path: str) -> Callable[..., None]:
        def shadow(*args: Any, **kwargs: Any) -> None:
            self.record(path, "print", OutputRole.LOGGED, args, kwargs)

        return shadow

    def _log_method(self, path: str) -> Callable[..., None]:
        def shadow(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(
                    f"`self.log({name}, {tuple(value.shape)} tensor)` was called, but the tensor must have one element"
                )
            scalar = scalar_of(value)
            if scalar is not None and scalar.tensor is not None:  # as Lightning makes it one; nobody waits for it
                value = scalar.tensor.detach().reshape(()).to(torch.get_default_dtype())
            bool(kwargs.get("batch_size"))  # weighs what is logged on all ranks: this rank's number of rows may not
            self.record(path, "log", OutputRole.LOGGED, (name, value, *args), kwargs)

        return shadow


def _hides_tensor(item: Any) -> bool:
    """Whether an object that is no container has a tensor of the graph in an attribute or, for sets, inside."""
    if isinstance(item, (nn.Module, type)):
        return False
    inside = item if isinstance(item, (set, frozenset)) else getattr(item, "__dict__", {}).values()
    return any(isinstance(value, private.FakeTensor) for value in inside)


@contextlib.contextmanager
def _shadow(instance: nn.Module, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    attributes = instance.__dict__
    had, before = name in attributes, attributes.get(name)
    attributes[name] = replacement
    try:
        yield
    finally:
        if had:
            attributes[name] = before
        else:
            del attributes[name]
