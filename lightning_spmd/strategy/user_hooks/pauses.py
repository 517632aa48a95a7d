"""Hooks on gradients run while an iteration pauses before its update; gradients are made when a hook reads them.

``on_after_backward`` and ``on_before_optimizer_step`` may read gradients or change them, which is unknown until they
have run. So they run in a pause of the iteration's graph, behind a fence: a torch-function mode sees accesses to a
tensor's ``grad`` and makes the gradients first. If hooks only read, the rest of the graph runs unchanged. If gradients
were replaced, a graph of the update alone takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.stages import BuildOptions
from lightning_spmd.stages.runtime.pausing import PausingExecutable
from lightning_spmd.strategy.steps.eager_path import add_gradients
from lightning_spmd.strategy.steps.loss_scaling import TrainersScaler
from lightning_spmd.strategy.support.detectors import GRADIENT_HOOKS, is_overridden
from lightning_spmd.strategy.user_hooks.fence import FencedHook, FencedHooks

PATIENCE = 4
"""Steps in a row after whose hooks a graph could not go on, until two graphs take its place."""
_BEFORE_ZEROING = "on_before_zero_grad"


def gradient_hooks_of(module: Any, trainer: Any) -> list[tuple[Any, str]]:
    """Overridden hooks between the forward pass and the update: whose method, and which."""
    found = [(module, hook) for hook in GRADIENT_HOOKS if is_overridden(hook, module, LightningModule)]
    for callback in trainer.callbacks:
        found += [(callback, hook) for hook in GRADIENT_HOOKS if is_overridden(hook, callback, Callback)]
    return found


def may_pause(options: BuildOptions, trainer: Any) -> bool:
    """Whether graphs may pause for hooks on gradients: only if iterations can overlap then.

    Clipping by the norm of all gradients waits for all of them anyway.

    Args:
        options: the build options.
        trainer: the Trainer.
    """
    schedulers = [c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]
    return (
        options.overlap_iterations is not False
        and (options.lowering, options.cuda_graphs) == ("none", False)
        and not trainer.gradient_clip_val
        and trainer.accumulate_grad_batches == 1
        and not schedulers
        and TrainersScaler(trainer)() is None
    )


class Pauses:
    """The pauses of one fit.

    Args:
        module: the LightningModule.
        all_ranks: returns whether something holds on every rank.

    Attributes:
        left: memory in whose place hooks have put other memory, in this step.
        hidden: whether gradients of the step before should be there, and were never made.
    """

    def __init__(self, module: Any, all_ranks: Callable[[bool], bool]) -> None:
        self._module = module
        self._all_ranks = all_ranks
        self._fenced = FencedHooks()
        self._executable: PausingExecutable | None = None
        self._given: dict[str, _Given] | None = None
        self._behind_backward = False
        self.left: list[torch.UntypedStorage] = []
        self.hidden = False
        self.in_vain = 0  # pauses in a row after which the graph could not go on

    def put_fences(self) -> None:
        """From now on hooks on gradients are seen."""
        for owner, hook in gradient_hooks_of(self._module, self._module.trainer):
            self._fenced.put(self._call_before_zeroing if hook == _BEFORE_ZEROING else self.call, owner, hook)

    def take_away(self) -> None:
        """Restore all hooks."""
        self._fenced.take_away()

    def unfenced(self) -> str | None:
        """A hook on gradients that came later, or None."""
        for owner, hook in gradient_hooks_of(self._module, self._module.trainer):
            if not isinstance(vars(owner).get(hook), FencedHook):
                return f"{type(owner).__name__}.{hook} is overridden"
        return None

    # ------------------------------------------------------------------ one step
    def begin(self, executable: PausingExecutable) -> None:
        """An iteration has paused."""
        self._executable, self._given, self._behind_backward = executable, None, False
        self.left.clear()

    def ran_eagerly(self) -> None:
        """The forward pass was no graph's: gradients are real, and stay."""
        self._executable, self.hidden = None, False

    def backward(self) -> None:
        """From now on gradients are there for who looks."""
        self._behind_backward = True

    def call(self, hook: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a hook behind the fence."""
        if self._executable is None or not self._behind_backward:
            return hook(*args, **kwargs)
        with _SeesGradients(self._show, self.left):
            return hook(*args, **kwargs)

    def end(self) -> bool:
        """After the hooks: whether the graph may go on; if not, gradients are in ``p.grad``."""
        executable = self._executable
        if executable is None:
            return False
        same = self._same() and executable.is_current
        same = same and not any(executable.goes_on_with(memory) for memory in self.left)
        if executable.shows_parts:  # the rows that a hook has changed may be another rank's
            same = self._all_ranks(same)
        if not same:
            self._show()
            executable.drop()
        self.hidden = self._given is None
        self.in_vain = 0 if same else self.in_vain + 1
        self._executable = None
        self.left.clear()
        return same

    # ------------------------------------------------------------------ pieces
    def _call_before_zeroing(self, hook: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``on_before_zero_grad``, where the gradients of the step before still exist, if they were made."""

        def refuse() -> None:
            if not self.hidden:
                return
            raise ConfigurationError(
                f"{_BEFORE_ZEROING} looks at p.grad of the step before, which strategy='spmd' did not find in its code "
                "and so did not keep. Look at gradients in on_after_backward or on_before_optimizer_step, or use "
                "SPMDStrategy(overlap_iterations=False)"
            )

        with _SeesGradients(refuse, self.left):
            return hook(*args, **kwargs)

    def _show(self) -> None:
        """Let ``p.grad`` be what the backward pass of eager training leaves there."""
        if self._given is not None or self._executable is None:
            return
        with private.no_torch_functions():
            operands = self._executable.operand_storages()
            gradients = {name: private.no_view(value) for name, value in self._executable.gradients().items()}
            add_gradients(self._module, gradients)
            self._given = {name: _Given(value, operands) for name, value in gradients.items()}

    def _same(self) -> bool:
        """Whether gradients are what the graph goes on with."""
        given = self._given or {}
        for name, parameter in self._module.named_parameters():
            one = given.get(name)
            if parameter.grad is not (one and one.value) or (one is not None and not one.reaches_the_graph()):
                return False
        return True


class _Given:
    """A gradient that hooks received.

    Args:
        value: the gradient.
        storages: memory that the update reads. Writes elsewhere are found by comparison with a copy.
    """

    def __init__(self, value: Tensor, storages: set[int]) -> None:
        local = private.local_tensor(value)
        self.value = value
        self._place = local.data_ptr()
        self._before = None if private.storage_of(local) in storages else local.clone()

    def reaches_the_graph(self) -> bool:
        """Whether the update reads the gradient's present value; ``p.grad.data = x`` gives it another memory."""
        if self._before is not None:
            return _alike(self.value, self._before)
        return private.local_tensor(self.value).data_ptr() == self._place


def _alike(value: Tensor, before: Tensor) -> bool:
    local = private.local_tensor(value)
    return bool(((local == before) | (local.isnan() & before.isnan())).all())


_LOOKS = frozenset((Tensor.grad.__get__, Tensor.grad.__set__, Tensor.grad.__delete__, Tensor.__deepcopy__))  # type: ignore[attr-defined]


_ASSIGNS = Tensor.data.__set__  # type: ignore[attr-defined]


class _SeesGradients(TorchFunctionMode):
    """Calls ``look`` when code accesses a tensor's gradient; keeps memory that code takes from a tensor in ``left``."""

    def __init__(self, look: Callable[[], None], left: list[torch.UntypedStorage]) -> None:
        super().__init__()
        self._look, self._left = look, left

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOKS:
            self._look()
        if func == _ASSIGNS:
            self._left.append(args[0].untyped_storage())
        return func(*args, **(kwargs or {}))
