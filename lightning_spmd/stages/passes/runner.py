"""Runs passes over one sharded step and verifies the graph after each that changed it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import STAMP, verify_sharded
from lightning_spmd.stages.passes.contract import GraphPass, PassState, check_order


def run_passes(
    step: ShardedStep,
    passes: Sequence[GraphPass],
    state: PassState,
    on_result: Callable[[str, ShardedStep], None] = lambda _name, _step: None,
) -> ShardedStep:
    """Apply ``passes`` in order.

    Args:
        step: changed in place.
        passes: the list; its order is checked before anything runs.
        state: options, and what the passes noted.
        on_result: called with each pass' name and the step after it (dumps).

    Raises:
        ConfigurationError: the list breaks a contract.
        VerificationError: a pass broke the graph; names the pass.
    """
    check_order(passes)
    verified: list[Any] | None = None
    for current in passes:
        current.run(step, state)
        if verified is None or _content(step) != verified:  # half of the passes change nothing
            try:
                verify_sharded(step, stamp=True)
            except VerificationError as error:
                raise VerificationError(f"pass {current.name!r} broke the graph: {error}") from error
            verified = _content(step)
        on_result(current.name, step)
    step.graph_module.recompile()
    return step


def _content(step: ShardedStep) -> list[Any]:
    """All that verification looks at, to be compared later: these objects are replaced, never changed."""
    content: list[Any] = [step.signature, step.axes]
    for node in step.graph_module.graph.nodes:
        meta = node.meta
        content += (node, node.target, node.args, node.kwargs, meta.get("val"), meta.get("info"), meta.get(STAMP))
    return content
