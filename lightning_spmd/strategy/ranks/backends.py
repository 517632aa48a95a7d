"""What the backend of a process group cannot do with a GPU's tensors, said before it ends the process."""

from __future__ import annotations

import torch

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import collective_name, starts_collective

_OF_GLOO = {"all_reduce", "all_reduce_coalesced", "broadcast"}
"""What Gloo does with a GPU's tensors: https://docs.pytorch.org/docs/stable/distributed.html#backends. At others it
ends the process by a segmentation fault (torch 2.11)."""


def check_collectives(step: ShardedStep, backend: str) -> None:
    """Check that a graph's collectives are such that the backend has them.

    Args:
        step: the graph.
        backend: of the process groups, one for all kinds of device or ``"cpu:gloo,cuda:nccl"``.

    Raises:
        ConfigurationError: it has not.
    """
    of_gpus = [part.removeprefix("cuda:") for part in backend.split(",") if not part.startswith("cpu:")]
    if of_gpus != ["gloo"]:
        return
    found = {collective_name(n) for n in step.graph_module.graph.nodes if starts_collective(n) and _is_on_gpu(n)}
    refused = [name for name in found if name.rstrip("_") not in _OF_GLOO]
    if refused:
        raise ConfigurationError(
            f"process_group_backend={backend!r}: this step needs {', '.join(sorted(refused))} of a GPU's tensors, "
            "which Gloo has not; leave process_group_backend out, for NCCL"
        )


def _is_on_gpu(node: torch.fx.Node) -> bool:
    operands = [operand.meta.get("val") for operand in node.all_input_nodes]
    return any(isinstance(value, TensorSpec) and value.device.type == "cuda" for value in operands)
