"""The artefacts between stages: CapturedStep → ShardedStep → IterationGraphs. Each prints itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from lightning_spmd.ir.guards import Guards
from lightning_spmd.ir.placement import ShardAxis
from lightning_spmd.ir.signature import Signature


@dataclass
class CapturedStep:
    """One training iteration as a global-view graph: the one-device program on the global batch.

    Args:
        graph_module: the graph. Placeholders follow ``signature.inputs``; the output node returns one flat tuple that
            follows ``signature.outputs``. Every node has ``meta["val"]`` and call nodes ``meta["info"]`` (ir.node_info).
            In-place operators stay in place and name their result; parameters and state are updated through the
            placeholders.
        signature: roles of inputs and outputs.
        guards: when the graph may be used again.
        constants: live tensors that the code reaches without being parameters, buffers or batch; read anew each step.
        replay: recorded ``self.log`` and metric calls (opaque here, for the strategy).
        output_tree: how to rebuild what training_step returned (opaque here, for the strategy).
    """

    graph_module: fx.GraphModule
    signature: Signature
    guards: Guards
    constants: list[Tensor] = field(default_factory=list)
    replay: Any = None
    output_tree: Any = None


@dataclass
class ShardedStep:
    """One rank's graph: local shapes, explicit collectives. ``signature`` carries placements, one a mesh axis."""

    graph_module: fx.GraphModule
    signature: Signature
    axes: tuple[ShardAxis, ...]
    fallbacks: list[str] = field(default_factory=list)


@dataclass
class IterationGraphs:
    """What runs: ``main`` each iteration; ``setup`` and ``cleanup`` are filled by cross-iteration scheduling.

    With nothing deferred, ``setup`` and ``cleanup`` are None and ``main`` is the whole iteration.
    """

    main: ShardedStep
    setup: ShardedStep | None = None
    cleanup: ShardedStep | None = None
