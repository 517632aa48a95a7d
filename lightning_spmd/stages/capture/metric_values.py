"""What a metric gives for this batch, where the step computes with it: a loss that is a metric of torchmetrics.

    loss = self.criterion(prediction, target)          a torchmetrics.Metric
    return loss

Where the value is only logged, the metric's own call after the run gives it (``log_recorder.py``). Where the step needs
a tensor, a copy of the metric without any history computes it in the graph. The metric itself is updated after the run
all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_spmd.ir.steps import CallRef
from lightning_spmd.stages.capture.later_value import LaterValue, MadeOf, Mark

_SHADOWED = ("update", "forward", "compute", "reset")
_OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "floordiv", "rfloordiv", "mod",
    "rmod", "matmul", "rmatmul", "neg", "abs", "round", "lt", "le", "gt", "ge", "eq", "ne", "getitem", "len", "iter",
    "bool",
)  # fmt: skip


class MetricValue(LaterValue):
    """The value of one metric for this batch.

    Args:
        reference, metric, made_of, mark: as of any value that is there after the run.
        now: computes it in the graph; None if that cannot be.
    """

    def __init__(
        self, reference: CallRef, metric: str, made_of: MadeOf, mark: Mark, now: Callable[[], Tensor | None]
    ) -> None:
        super().__init__(reference, metric, made_of, mark)
        object.__setattr__(self, "_now", now)
        object.__setattr__(self, "_tensor", None)

    def tensor(self) -> Tensor:
        """The value in the graph.

        Raises:
            CaptureError: it cannot be there.
        """
        found = object.__getattribute__(self, "_tensor")
        if found is None:
            found = object.__getattribute__(self, "_now")()
            if not isinstance(found, Tensor):
                raise self.misuse()
            object.__setattr__(self, "_tensor", found)
        return found

    @override
    def _used(self, *_: Any, **__: Any) -> Any:
        return self.tensor()

    @override
    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return getattr(found, name) if isinstance(found, Tensor) else found

    __hash__ = object.__hash__

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(as_tensor, args), **{name: as_tensor(value) for name, value in (kwargs or {}).items()})


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: MetricValue, *others: Any) -> Any:
        return getattr(self.tensor(), name)(*map(as_tensor, others))

    return apply


for _name in _OPERATORS:
    setattr(MetricValue, f"__{_name}__", _operator(f"__{_name}__"))


def as_tensor(value: Any) -> Any:
    """The tensor of a metric's value, also in a list or tuple; anything else as it is."""
    if isinstance(value, MetricValue):
        return value.tensor()
    if type(value) in (list, tuple) and any(isinstance(item, MetricValue) for item in value):
        return type(value)(map(as_tensor, value))
    return value


def with_loss(returned: Any) -> Any:
    """What training_step returned, with a tensor as its loss where that is a metric's value."""
    if isinstance(returned, dict) and isinstance(returned.get("loss"), MetricValue):
        return {**returned, "loss": as_tensor(returned["loss"])}
    return as_tensor(returned) if isinstance(returned, MetricValue) else returned


def of_this_batch(
    metric: Metric, args: tuple[Any, ...], kwargs: Mapping[str, Any], on_use: Callable[[Metric], None]
) -> Callable[[], Tensor | None]:
    """What computes a metric's value for this batch, or gives None for a metric that consists of others.

    Args:
        metric: the user's, which is left as it is.
        args: of ``forward``.
        kwargs: of ``forward``.
        on_use: told when it is computed.
    """
    with_gradient = torch.is_grad_enabled()

    def compute() -> Tensor | None:
        if _has_parts(metric):
            return None
        on_use(metric)
        fresh = _copied(metric)
        for name in _SHADOWED[1::2]:  # the copy has made the others anew
            vars(fresh).pop(name, None)
        for name, state in fresh.metric_state.items():
            if isinstance(state, list):
                object.__setattr__(fresh, name, [])
        with torch.set_grad_enabled(with_gradient):
            found = type(metric).forward(fresh, *map(as_tensor, args), **{k: as_tensor(v) for k, v in kwargs.items()})
        return found if isinstance(found, Tensor) else None

    return compute


def _copied(metric: Metric) -> Metric:
    """As ``copy.copy`` does, which makes torchmetrics print the metric, and that may read tensors of it."""
    fresh: Metric = type(metric).__new__(type(metric))
    fresh.__setstate__(metric.__getstate__())
    return fresh


def _has_parts(metric: Metric) -> bool:
    inside: list[Any] = [*list(metric.modules())[1:]]
    for value in vars(metric).values():
        inside += value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
    return any(isinstance(part, Metric) for part in inside)
