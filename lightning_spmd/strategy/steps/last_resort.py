"""The fallback for a training step that cannot be a graph."""

from __future__ import annotations

from typing import NoReturn

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.steps import Variant
from lightning_spmd.messages import warn
from lightning_spmd.parallel.parallel_plan import options_in_parts
from lightning_spmd.strategy.graphs.run_context import FellBack, RunContext
from lightning_spmd.strategy.support.eager_semantics import averaged


class NoEagerWay(BaseException):
    """Control flow, on all ranks: a step whose Python is under way can be no graph, and run no other way.

    No ``except Exception`` of the user's swallows it.
    """


def must_be_graphs(context: RunContext) -> bool:
    """Whether no rank alone could run a step: of its parameters, or of the state of its optimizers, it has a part."""
    if context.mesh is None:
        return False
    plan = context.settings.ranks.plan(Variant())
    by_hand = context.optimizer is not None and not context.module.automatic_optimization
    return plan.shards_parameters or (plan.needs_graphs and by_hand)


def train_eagerly(context: RunContext, reason: str) -> NoReturn:
    """Go on eagerly, announced with the reason.

    Raises:
        FellBack: that is how.
        ConfigurationError: it cannot go on eagerly.
    """
    plan, updates = context.settings.ranks.plan(Variant()), context.settings.bf16_updates
    if context.mesh is not None and plan.needs_graphs:
        raise ConfigurationError(
            f"with state sharded over the ranks training cannot go on eagerly: {reason}. Change that, or use "
            f"{options_in_parts(plan)}"
        )
    if updates != "plain":
        raise ConfigurationError(
            f"with bf16_updates={updates!r} training cannot go on eagerly: {reason}. Change "
            "that, or leave bf16_updates out"
        )
    semantics = "" if context.mesh is None else averaged(context.module)
    warn(f"strategy='spmd' trains eagerly from here on{semantics}: {reason}")
    raise FellBack
