"""Measures the convolutions of a plan's own graphs, on operands of their shapes, strides and dtypes.

One speed for all of them (``calibration.py``) misses the shape: on one core, convolutions of three channels reached 34
GFLOP/s and those of 256 channels 230. Products were predicted worse so where four ranks share two cores (1.29 of the
measured time under tensor parallelism, 1.09 with one speed): what they read has just been written, and is in a cache.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from lightning_spmd._private_api import OpOverload
from lightning_spmd.cost.operators import work_of
from lightning_spmd.ir.aliasing import written_arguments
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.planning.calibration import mean_seconds, several

Kernels = Mapping[str, float]
"""Seconds, by :func:`kernel_of`."""
SECONDS = 0.05
"""How long each operator goes on."""
UNCACHED = 256 << 20
"""Bytes of operands of which no cache holds any when they are read again."""
MOST_COPIES = 16


def kernel_of(node: fx.Node) -> str | None:
    """What a node computes on which operands; None if it is not measured.

    Its dtypes are part of it and the device is not: what is measured is the machine's CPU.
    """
    target: Any = node.target
    if not isinstance(target, OpOverload) or written_arguments(node):
        return None
    if work_of(node).kind != "convolution":
        return None
    operands = [n.meta.get("val") for n in node.all_input_nodes]
    if not all(isinstance(o, TensorSpec) and all(type(s) is int for s in (*o.shape, *o.stride)) for o in operands):
        return None
    described = fx.map_arg((node.args, node.kwargs), _description)
    return f"{target} {described}"


def measure_kernels(graphs: Iterable[fx.Graph]) -> dict[str, float]:
    """Seconds of every such operator of some graphs; all ranks measure those that all of them have, at the same time.

    Args:
        graphs: of this rank.
    """
    nodes = {kernel: node for graph in graphs for node in graph.nodes if (kernel := kernel_of(node)) is not None}
    kernels = sorted(nodes)
    if several():
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, kernels)
        kernels = sorted(set(kernels).intersection(*everyone))
    found = {kernel: _seconds(nodes[kernel]) for kernel in kernels}
    if not several():
        return found
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return {kernel: statistics.mean(one[kernel] for one in everyone) for kernel in kernels}


# ---------------------------------------------------------------- pieces
def _description(node: fx.Node) -> str:
    spec: TensorSpec = node.meta["val"]
    return f"{spec}{list(spec.stride)}"


def _seconds(node: fx.Node) -> float:
    target: Any = node.target
    specs = {n: n.meta["val"] for n in node.all_input_nodes}
    copies = max(1, min(MOST_COPIES, UNCACHED // max(1, sum(spec.bytes for spec in specs.values()))))
    made = [{n: _operand(spec) for n, spec in specs.items()} for _ in range(copies)]
    calls = deque(fx.map_arg((node.args, node.kwargs), one.__getitem__) for one in made)
    results = deque[Any](maxlen=copies)  # in the graph, what is written now has not been read just before

    def call() -> None:
        calls.rotate()
        args, kwargs = calls[0]
        results.append(target(*args, **kwargs))

    with torch.no_grad():
        return mean_seconds(call, SECONDS)


def _operand(spec: TensorSpec) -> Tensor:
    reach = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    memory = torch.ones(max(1, reach), dtype=spec.dtype)
    return (memory.normal_() if spec.dtype.is_floating_point else memory).as_strided(spec.shape, spec.stride)
