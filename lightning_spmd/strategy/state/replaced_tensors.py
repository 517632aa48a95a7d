"""Sharding replaces parameters: references to the user's tensors would be to tensors that are not trained.

An optimizer that was made in ``__init__`` gets the parts. A step that computes with the whole one (from a list, from a
closure) is an error, and so are hooks on it, which autograd would have called.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.messages import place_of

_NAME = "lightning_spmd_replaced"
"""Attribute of a tensor that is no longer the module's: its name there. Tensors of no run have none."""


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
        self._entries: list[tuple[weakref.ref[Tensor], Tensor]] = []
        self._hooked: list[str] = []

    def note(self, exchanged: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """Remember the tensors of a module that was sharded.

        Args:
            exchanged: (name, old tensor, new tensor).
        """
        for name, old, new in exchanged:
            self._hooked += [f"{name}{place_of(hook)}" for hook in private.parameter_hooks(old)]
            setattr(old, _NAME, name)
            self._entries.append((weakref.ref(old), new))

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

    def leave(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers train the parts, whatever they were given; from here on nothing is kept."""
        alive = [(old(), new) for old, new in self._entries]
        exchange_parameters(optimizers, {id(old): new for old, new in alive if old is not None})
        self._entries.clear()


@contextlib.contextmanager
def keeping_attributes(module: nn.Module) -> Iterator[None]:
    """A context in which a module moves to a device. It keeps the attributes that users set on parameters."""
    before = [(p, dict(vars(p))) for p in module.parameters() if isinstance(p, DTensor)]
    yield
    for parameter, attributes in before:
        vars(parameter).update({key: value for key, value in attributes.items() if key not in vars(parameter)})


def exchange_parameters(optimizers: Sequence[Optimizer], new: Mapping[int, Tensor]) -> None:
    """Give optimizers other parameters, and keep the state.

    Args:
        optimizers: the optimizers of the run.
        new: the new parameter by the old one's ``id``.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new.get(id(p), p) for p in group["params"]]
        states = [(new.get(id(p), p), values) for p, values in optimizer.state.items()]
        optimizer.state.clear()
        optimizer.state.update(states)


def check_used(tensors: Iterable[object]) -> None:
    """Check that a step does not compute with a tensor that its parts replaced.

    Raises:
        ConfigurationError: naming the parameter.
    """
    for tensor in tensors:
        if isinstance(tensor, Tensor) and (name := getattr(tensor, _NAME, None)) is not None:
            raise ConfigurationError(
                f"the step uses the tensor of {name} from before it was sharded. Something outside the module holds it "
                "(a list, a dictionary, a closure), and it is not trained. Take the parameter from its module where "
                "you need it, or use data_parallel='replicate'"
            )
