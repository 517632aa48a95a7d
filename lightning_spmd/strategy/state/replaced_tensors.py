"""Sharding replaces parameters: references to the user's tensors would be to tensors that are not trained.

These stand for the parts from then on (``ir/successors.py``), and an optimizer that was made in ``__init__`` gets the
parts. A step that computes with another tensor on the memory of the whole one is an error. So are hooks on it, which
autograd would have called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.signature import GraphInput, InputRole
from lightning_spmd.ir.successors import replace, successor_of
from lightning_spmd.messages import place_of, warn
from lightning_spmd.strategy.state.memory import attribute_of

_HELD: list[tuple[private.WeakStorage, str]] = []
"""Memory of whole parameters that something else holds, with their names."""


def check_can_be_in_parts(module: nn.Module, options: str) -> None:
    """Check that the tensors of a module can be replaced.

    Args:
        module: the whole model.
        options: those to take back so that parameters stay whole.

    Raises:
        ConfigurationError: naming a module that torch.jit compiled.
    """
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ConfigurationError(
                f"{name} is a torch.jit.ScriptModule, whose parameters cannot be in parts on the ranks. Leave it the "
                f"plain module that it was made of, or use {options}"
            )


class ReplacedTensors:
    """The tensors that one run's parts replaced."""

    def __init__(self) -> None:
        self._hooked: list[str] = []

    def note(self, exchanged: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """Remember the tensors of a module that was sharded.

        Args:
            exchanged: (name, old tensor, new tensor).
        """
        for name, old, new in exchanged:
            self._hooked += [f"{name}{place_of(hook)}" for hook in private.parameter_hooks(old)]
            if not isinstance(old, DTensor) and old.layout is torch.strided:
                _HELD.append((private.WeakStorage(old.untyped_storage()), name))
            replace(old, new)
        _HELD[:] = [(memory, name) for memory, name in _HELD if not memory.expired()]

    def check_hooks(self, options: str) -> None:
        """Check that no hook went with the tensors.

        Args:
            options: those to take back so that parameters stay whole.

        Raises:
            ConfigurationError: one did.
        """
        if self._hooked:
            raise ConfigurationError(
                f"autograd hooks are registered on {', '.join(self._hooked[:3])}: autograd must call them, and "
                f"training with parameters in parts runs in graphs. Change that, or use {options}"
            )


@contextlib.contextmanager
def moving(module: nn.Module) -> Iterator[None]:
    """A context in which Lightning moves a module to a device.

    Parameters keep the attributes that users set on them. Where something holds autograd's nodes of parameters in
    parts, or weak references, torch cannot move these, and they stay: the run has ended, or has an error to tell.
    """
    before = [(p, dict(vars(p))) for p in module.parameters() if isinstance(p, DTensor)]
    original = module.cpu

    def cpu() -> nn.Module:
        try:
            return original()
        except RuntimeError as error:
            if "swap" not in str(error):
                raise
            if any(p.device.type != "cpu" for p in module.parameters()):
                warn(f"parameters stay on their device, for something holds the graph of a result of theirs: {error}")
            return module

    if before:
        vars(module)["cpu"] = cpu
    try:
        yield
    finally:
        vars(module).pop("cpu", None)
        for parameter, attributes in before:
            vars(parameter).update({key: value for key, value in attributes.items() if key not in vars(parameter)})


def give_successors(optimizers: Sequence[Optimizer]) -> None:
    """Let optimizers train the parts, whatever they were given; their state stays."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [successor_of(p) for p in group["params"]]
        states = [(successor_of(p), values) for p, values in optimizer.state.items()]
        optimizer.state.clear()
        optimizer.state.update(states)


def check_used(entries: Iterable[GraphInput], values: Iterable[object], module: nn.Module) -> None:
    """Check that a step does not compute with a tensor on memory that its parts replaced.

    Args:
        entries: the inputs of its graph.
        values: what they are.
        module: may have some of them as attributes.

    Raises:
        ConfigurationError: naming both.
    """
    names = {memory.cdata: name for memory, name in _HELD if not memory.expired()}
    for entry, value in zip(entries, values, strict=True) if names else ():
        if entry.role is InputRole.CONSTANT and isinstance(value, Tensor) and not isinstance(value, DTensor):
            name = names.get(value.untyped_storage()._cdata)  # noqa: SLF001 - what torch compares storages by
            if name is not None:
                used = attribute_of(module, value) or entry.name
                raise ConfigurationError(
                    f"the step uses {used}, a tensor on the memory that {name} had before it was sharded, which "
                    "does not follow training: take it from the parameter in the step, or .clone() it if it shall stay "
                    "as it is"
                )
