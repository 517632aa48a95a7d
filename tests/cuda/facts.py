"""What tests ask of a rank's graphs, as plain values: graphs stay in the lane's process."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_spmd._private_api import pytree
from lightning_spmd.cost.memory import liveness
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.layout import lies_as, walked
from lightning_spmd.ir.node_info import TensorSpec, spec_of
from lightning_spmd.ir.reads import checks_of
from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.ir.stable_hash import stable_hash
from lightning_spmd.ir.steps import IterationGraphs, ShardedStep
from lightning_spmd.stages import finish
from lightning_spmd.stages.runtime.agreement.same_graphs import describe, describe_capture, exchanges
from lightning_spmd.stages.runtime.regions.choice import fitting_regions
from lightning_spmd.strategy.ranks.backends import check_collectives
from tests.cuda.ranks import Built, Wanted, build, process_groups
from tests.cuda.stand_ins import gpus
from tests.helpers.activations import activation_collectives


@dataclass(frozen=True)
class Facts:
    """Of one rank.

    Args:
        vote: what the rank says of its batch.
        digests: of the captured graph and of every graph that is made of it, which must be equal on all ranks.
        operators: how often each is in the graph that runs first, by name.
        captured: the same of the captured graph.
        devices: on which tensors lie.
        walked: number of lists that fused and foreach operators walk, and of those that lie otherwise.
        fallbacks, activations: operators on gathered tensors, collectives on activations.
        gathers: dtypes of the collectives that gather.
        gathered: number of elements that they make, by dtype.
        deferred: whether work moves into the next iteration.
        memory: by phase, the most bytes alive beside the inputs, and those that are left for the next iteration.
        exchanges: what ranks with batches of their own must have in common.
        prefixes: digests of the graphs that are run to know a value that Python reads.
        general: whether the graph does for all sizes that it was asked to leave open.
    """

    vote: str
    digests: dict[str, str]
    operators: Counter[str]
    captured: Counter[str]
    devices: set[str]
    walked: tuple[int, int]
    fallbacks: list[str]
    activations: list[str]
    gathers: list[str]
    gathered: Counter[str]
    deferred: bool
    memory: dict[str, tuple[int, int]]
    exchanges: list[str]
    prefixes: list[str]
    general: bool

    @property
    def nodes(self) -> int:
        return self.operators.total()


def facts(wanted: Wanted) -> Facts:
    """Of the graphs that the strategy builds."""
    with gpus(wanted.kernel), process_groups(wanted.rank, wanted.count):
        return _facts(build(wanted))


def in_regions(wanted: Wanted) -> set[str]:
    """Names of the operators that a compiler may take."""
    with gpus(wanted.kernel), process_groups(wanted.rank, wanted.count):
        regions = fitting_regions(build(wanted).executable.graphs.main)
    return {_name(node) for region in regions.values() for node in region.nodes}


def said_of_backends(wanted: Wanted, backends: list[str]) -> list[str]:
    """Why each backend cannot run the graph; empty if it can."""
    with gpus(wanted.kernel), process_groups(wanted.rank, wanted.count):
        step = build(wanted).executable.graphs.main
    return [_said_of_backend(step, backend) for backend in backends]


def _said_of_backend(step: ShardedStep, backend: str) -> str:
    try:
        check_collectives(step, backend)
    except ConfigurationError as error:
        return str(error)
    return ""


def facts_of_ranks(wanted: Wanted) -> list[Facts]:
    """Of all ranks, each with a device of its own."""
    return [facts(dataclasses.replace(wanted, rank=rank)) for rank in range(wanted.count)]


def _facts(built: Built) -> Facts:
    step, captured = built.executable.graphs.main, built.executable.captured
    nodes = list(step.graph_module.graph.nodes)
    lists = [one for node in nodes for one in walked(node)]
    crossed = [one for one in lists if not all(lies_as(spec_of(n), spec_of(one[0])) for n in one)]
    own = captured.variant.own_batch
    looks = () if own else (built.batch.shared_key(), built.batch.shared_values())
    found = {
        "vote": stable_hash(looks),
        "operators": Counter(_name(n) for n in nodes if n.op == "call_function"),
        "captured": Counter(_name(n) for n in captured.graph_module.graph.nodes if n.op == "call_function"),
        "devices": {str(spec.device) for n in nodes for spec in _specs(n)},
        "walked": (len(lists), len(crossed)),
        "fallbacks": list(step.fallbacks),
        "activations": [n.name for n in activation_collectives(step)],
        "gathers": [str(spec_of(n).dtype) for n in nodes if "all_gather" in _name(n)],
        "gathered": Counter(),
        "exchanges": exchanges(step, captured),
        "prefixes": [stable_hash(describe(prefix)) for prefix in built.prefixes],
        "general": bool(built.executable.sizes and built.executable.sizes.places),
    }
    for node in nodes:
        if "all_gather" in _name(node):
            found["gathered"][str(spec_of(node).dtype)] += spec_of(node).numel
    graphs = IterationGraphs(main=step)
    memory = {"arranged": _memory(step)}
    digests = {"captured": stable_hash(describe_capture(captured)), "arranged": stable_hash(describe(step))}
    if built.ranks.mesh is not None and _may_overlap(built):
        graphs = finish(captured, step, {n.name: 1e-4 for n in nodes})
        phases = {"setup": graphs.setup, "main": graphs.main, "cleanup": graphs.cleanup}
        digests |= {name: stable_hash(describe(phase)) for name, phase in phases.items() if phase is not None}
        memory |= {name: _memory(phase) for name, phase in phases.items() if phase is not None}
    return Facts(**found, digests=digests, deferred=graphs.cleanup is not None, memory=memory)


def _may_overlap(built: Built) -> bool:
    """Whether iterations of such steps may overlap, however it was asked for here."""
    captured = built.executable.captured
    apart = captured.variant.by_hand or captured.variant.own_batch
    return not apart and not checks_of(built.executable.graphs.main.graph_module.graph)


def _memory(step: ShardedStep) -> tuple[int, int]:
    found = liveness(step.graph_module.graph, step.signature)
    pending = [
        e.value.bytes for _, e in step.signature.outputs_of(OutputRole.PENDING) if isinstance(e.value, TensorSpec)
    ]
    return found.peak, sum(pending)


def _name(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")


def _specs(node: fx.Node) -> list[TensorSpec]:
    values: list[Any] = pytree.tree_leaves(node.meta.get("val"))
    return [value for value in values if isinstance(value, TensorSpec) and value.device != torch.device("cpu")]
