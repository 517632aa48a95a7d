"""Memory layouts of parameters and state: some are refused, some are converted.

Eager training is silent about this: a fused optimizer walks over gaps, or past the end of an expanded parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError, ExpansionError
from lightning_spmd.ir.layout import densely, has_layout, in_layout, is_dense
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.shared_memory import Named, places_of, reach, shared
from lightning_spmd.ir.signature import GraphInput, InputRole
from lightning_spmd.parallel.pieces import local_spec
from lightning_spmd.parallel.state import StateMesh, broadcast_from_first


def begin_alike(module: nn.Module) -> None:
    """Give all ranks rank 0's values of replicated tensors.

    Raises:
        ConfigurationError: parameters share memory in a way that several ranks cannot keep.
    """
    check_shared_memory(module)
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor):
            broadcast_from_first(tensor)


# ---------------------------------------------------------------------- what is refused
def check_initialized(module: nn.Module) -> None:
    """Check that all parameters and buffers have shapes.

    Raises:
        ConfigurationError: naming those that wait for a first batch.
    """
    lazy = [name for name, t in (*module.named_parameters(), *module.named_buffers()) if is_lazy(t)]
    if lazy:
        raise ConfigurationError(
            f"{', '.join(lazy[:3])} has no shape yet (a lazy module of torch): graphs and ranks need it before the "
            "first batch. Run the layer once in __init__ or configure_model, self(torch.zeros(1, 8)), or give the size"
        )


def check_parameters(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
    """Check that every parameter of an optimizer can be updated in place.

    Args:
        optimizers: the optimizers of the run.
        names: of parameters, by ``id``.

    Raises:
        ConfigurationError: naming the parameter.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter), "a parameter of the optimizer")
                if parameter.requires_grad and not isinstance(parameter, DTensor):
                    _check_parameter(name, parameter.detach(), fused=bool(group.get("fused")))


def _check_parameter(name: str, parameter: Tensor, *, fused: bool) -> None:
    spec = TensorSpec.of(parameter)
    if is_dense(spec):
        return
    where = f"parameter {name} of shape {list(spec.shape)} has strides {list(spec.stride)}"
    if _overlaps_itself(parameter):
        raise ConfigurationError(
            f"{where}: several of its elements are the same place in memory (expand, or overlapping windows), so no "
            "optimizer can update it. Make the parameter of the tensor before it is expanded, or of a .clone() of it"
        )
    if fused:
        raise ConfigurationError(
            f"{where}: there are gaps between its elements, and the optimizer's fused=True walks memory as if there "
            "were none (torch does not check that). Make the parameter of a .contiguous() tensor, or leave out fused"
        )


def check_shared_memory(module: nn.Module) -> None:
    """Check that no trained parameter shares memory with another parameter or buffer: several ranks would part them.

    Raises:
        ConfigurationError: naming both.
    """
    tensors = {id(t): (n, t) for n, t in (*module.named_parameters(), *module.named_buffers())}
    for (name, one), (other_name, other) in shared(tensors.values()):
        if one.requires_grad or other.requires_grad:
            raise ConfigurationError(
                f"{name} and {other_name} share memory but are two tensors: on several devices an update of one would "
                "not reach the other. Tie them by assigning the same nn.Parameter to both modules, or .clone() one"
            )


def check_writes(
    entries: Sequence[GraphInput], values: Sequence[object], name_of: Callable[[Tensor], str | None]
) -> None:
    """Check that inputs which a graph of several ranks writes share no memory with others, as passes assume.

    Args:
        entries: the graph's inputs.
        values: their live values.
        name_of: of those that are neither parameters nor buffers, for the user.

    Raises:
        ExpansionError: naming both.
    """
    for pair in _shared_and_written(entries, values):
        both = (name_of(t) or n for n, t in pair)
        raise ExpansionError(
            f"{' and '.join(both)} share memory but are two tensors, and a training step writes into it: the graph of "
            "one of several devices cannot keep that in order. Use one tensor object in both places, or .clone() one"
        )


def has_shared_writes(entries: Sequence[GraphInput], values: Sequence[object]) -> bool:
    """Whether an input that a graph writes shares memory with another input."""
    return bool(_shared_and_written(entries, values))


def _shared_and_written(entries: Sequence[GraphInput], values: Sequence[object]) -> list[tuple[Named, Named]]:
    pairs = zip(entries, values, strict=True)
    leaves = (InputRole.BATCH, InputRole.SHARED_BATCH)
    tensors = {id(v): (e, v) for e, v in pairs if isinstance(v, Tensor) and e.role not in leaves}
    written = {id(v) for e, v in tensors.values() if e.mutated}
    found = shared((e.name, v) for e, v in tensors.values())
    return [(one, other) for one, other in found if written & {id(one[1]), id(other[1])}]


def attribute_of(module: nn.Module, tensor: Tensor) -> str | None:
    """Where on a module a tensor is that is neither parameter nor buffer."""
    for path, part in module.named_modules():
        for key, value in vars(part).items():
            if value is tensor:
                return f"{path}.{key}" if path else key
    return None


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements are the same place in memory."""
    return int(places_of(tensor, reach(tensor)).sum()) != tensor.numel()


# ---------------------------------------------------------------------- what is put right
def lay_out_state(optimizer: Optimizer, mesh: StateMesh | None) -> None:
    """Give state the memory layout of its parameter if a fused kernel walks both.

    A checkpoint may come from a run with another memory format, or from state that was put together from parts.

    Args:
        optimizer: with ``fused=True`` in some group; others are unchanged.
        mesh: the mesh of the run; None on one device.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            wanted = TensorSpec.of(parameter)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and is_dense(wanted):
                    optimizer.state[parameter][key] = _laid_out(value, wanted, mesh)


def gradients_of(module: nn.Module, mesh: StateMesh | None) -> dict[str, Tensor]:
    """``p.grad`` by parameter name, each with its parameter's memory layout. A hook may have set another tensor."""
    named = {name: p for name, p in module.named_parameters() if p.grad is not None}
    return {name: _as_gradient(p.grad, p, mesh) for name, p in named.items() if p.grad is not None}


def _as_gradient(gradient: Tensor, parameter: Tensor, mesh: StateMesh | None) -> Tensor:
    if gradient.layout is not torch.strided:  # of a step that ran eagerly; the graph of the update is of dense ones
        gradient = gradient.to_dense()
    if gradient.shape != parameter.shape:
        return gradient
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):  # a hook's, as torch's operators leave it
        both = zip(gradient.placements, parameter.placements, strict=True)
        held = [own if whose.is_replicate() and not own.is_partial() else whose for own, whose in both]
        gradient = gradient if held == list(gradient.placements) else gradient.redistribute(placements=held)
    return _laid_out(gradient, densely(TensorSpec.of(parameter)), mesh)


def _laid_out(value: Tensor, wanted: TensorSpec, mesh: StateMesh | None) -> Tensor:
    """The tensor with the strides of ``wanted``; a part of it as graphs take parts."""
    if mesh is None or not isinstance(value, DTensor):
        return in_layout(value, wanted)
    placements = mesh.placements_of(value)
    local = private.local_tensor(value)
    part = local_spec(wanted, placements, mesh.axes)
    if has_layout(value, wanted) and has_layout(local, part):
        return value
    return mesh.wrap(in_layout(local, part), wanted, placements)


def tensors_on_other_devices(module: nn.Module, device: torch.device) -> list[str]:
    """Names of parameters, buffers and plain tensor attributes that are not on ``device``."""
    found = [n for n, t in [*module.named_parameters(), *module.named_buffers()] if t.device.type != device.type]
    for path, part in module.named_modules():
        if isinstance(part, Metric):
            continue
        found += [
            f"{path}.{name}".lstrip(".")
            for name, value in vars(part).items()
            if isinstance(value, Tensor) and value.ndim > 0 and value.device.type != device.type
        ]
    return found
