"""How a module comes to lie in parts on the ranks, and how it is seen whole."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_spmd.ir.steps import Variant
from lightning_spmd.parallel.staged_init import materialize, sharded_as_built
from lightning_spmd.parallel.state import StateMesh, shard_module, sharded_tensors_as
from lightning_spmd.strategy.checkpoints import shard_optimizer_state, tensors_changed
from lightning_spmd.strategy.memory import check_parameters
from lightning_spmd.strategy.saving import SavingStrategy


class ShardingStrategy(SavingStrategy):
    """Shards modules when they are built (``configure_model``) or at setup, and optimizer state with them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._staging: StateMesh | None = None

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Inside, sharded parameters of the module are plain whole tensors, to be read: for code that calls the module.

        All ranks enter together. Every rank holds all parameters meanwhile; what is written to them is lost. Without
        sharded parameters nothing happens.

        Example::

            with trainer.strategy.full_parameters():
                text = model.generate(prompt)
        """
        self.flush()
        if self._state is None or self.lightning_module is None:
            yield
            return
        with sharded_tensors_as(self.lightning_module, self._state.whole):
            yield

    @override
    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        shards = self._plan(Variant()).shards_parameters
        if shards and empty_init:
            with torch.device("meta"), self.precision_plugin.tensor_init_context():
                yield
            return
        staged = sharded_as_built(self._staging_mesh()) if shards and self._mesh is not None else None
        with super().tensor_init_context(empty_init), staged or contextlib.nullcontext():
            yield

    def _staging_mesh(self) -> StateMesh:
        """All ranks in one row: where parameters lie until their module is complete."""
        if self._staging is None:
            self._staging = StateMesh(self._flat_mesh())
        return self._staging

    def _materialize(self, module: Any) -> None:
        if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            shards = self._mesh is not None and self._plan(Variant()).shards_parameters
            materialize(module, self.root_device, self._staging_mesh() if shards else None)

    def _shard_module(self, module: Any) -> None:
        """From here on a rank keeps only its part of what the plan shards."""
        if self._mesh is not None:
            self._state = StateMesh(self._mesh)
            shard_module(module, self._plan(Variant()), self._state, self._staging)
            self._staging = None

    def _shard_again(self, module: nn.Module) -> None:
        """Lay everything out by another plan than the one of setup, the optimizers' parameters and state too."""
        if self._state is None:
            return
        before = dict(module.named_parameters(remove_duplicate=False))
        shard_module(module, self._plan(Variant()), self._state)
        after = dict(module.named_parameters(remove_duplicate=False))
        new = {id(old): after[name] for name, old in before.items()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [new.get(id(p), p) for p in group["params"]]
            states = [(new.get(id(p), p), values) for p, values in optimizer.state.items()]
            optimizer.state.clear()
            for parameter, values in states:
                optimizer.state[parameter] = tensors_changed(values, self._state.whole)
        self._shard_optimizers()

    def _shard_optimizers(self) -> None:
        check_parameters(self.optimizers, {id(p): name for name, p in self._named_parameters()})
        if self._state is not None and self._plan(Variant()).needs_graphs:
            names = {id(p): name for name, p in self._named_parameters()}
            for optimizer in self.optimizers:
                shard_optimizer_state(optimizer, names, self._plan(Variant()), self._state)
