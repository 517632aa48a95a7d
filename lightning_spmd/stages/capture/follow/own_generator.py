"""Torch's random generator in a step: reads and changes of its state are noted calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.operators.generator_state import READ_STATE, SEED, WRITE_STATE
from lightning_spmd.stages.capture.follow.step_state import StepState


class OwnGenerator:
    """Torch's generator on the host in one step.

    Args:
        step: the step.
    """

    def __init__(self, step: StepState) -> None:
        self._step = step
        self._random: Any = None  # the state of torch's generator, as the step knows it
        self._seed = 0
        self._draws = False

    def look(self) -> None:
        """Note the state of the generator."""
        if self._step.draws_as_eager and self._draws:
            self._random, self._seed = private.host_random_state(), private.host_seed()

    def watch(self) -> bool:
        """Note changes of torch's generator by its own methods, which no mode sees. Returns whether there are any.

        The graph draws what it has drawn so far from the state before. Asked before new calls, when a call draws and
        torch has another seed or there are several ways to go on, where Python reads, and behind the step.
        """
        if self._random is None or self._step.is_eager or self._step.is_apart:
            return False
        known, now = self._random, private.host_random_state()
        if known == now:
            return False
        with private.no_torch_functions():
            with self._step.beside():
                state, before = (torch.frombuffer(bytearray(s), dtype=torch.uint8) for s in (now, known))
                torch.default_generator.set_state(before)
            self._seed = private.host_seed()
            self._step.called(WRITE_STATE, (state,), {})
        return True

    def may_draw(self) -> bool:
        """Whether a known call that draws comes next; the state of the generator is noted before it."""
        if self._draws and self._random is not None:
            may_differ = private.host_seed() != self._seed or len(self._step.here.children) > 1
            return not (may_differ and self.watch())
        self._draws = True
        self.look()
        return True

    def of(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Reading or setting the state of torch's generator is a noted call: the graph draws the numbers before it."""
        with private.no_torch_functions():
            values = (*args, *kwargs.values())
            if name == "get_rng_state":
                return self._step.called(READ_STATE, (), {})
            if name == "set_rng_state" and isinstance(values[0], Tensor) and values[0].device.type == "cpu":
                return self._step.called(WRITE_STATE, values, {})
            if name == "manual_seed" and type(values[0]) is int and 0 <= values[0] < 2**63:
                self._step.called(SEED, values, {})
                return torch.default_generator
        self._step.eagerly(f"{name} in the step")
        return original(*args, **kwargs)
