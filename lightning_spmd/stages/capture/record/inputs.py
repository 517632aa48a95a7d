"""The inputs of a capture: fake tensors and recorded numbers, each with its placeholder and role."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.signature import GraphInput, InputRole
from lightning_spmd.stages.capture.numbers.host_scalar import HostScalar, Number
from lightning_spmd.stages.capture.record.recorder import Recorder
from lightning_spmd.stages.capture.user_code import user_location


class InputTable:
    """Creates placeholders in order and keeps what each one is.

    Args:
        recorder: the recorder whose graph receives the placeholders.
        fake_mode: makes fake tensors of live ones.

    Attributes:
        entries: what each placeholder is.
        live: the parameters, buffers and state that placeholders stand for.
        last: the latest placeholder.
    """

    def __init__(self, recorder: Recorder, fake_mode: Any) -> None:
        self.recorder = recorder
        self.fake_mode = fake_mode
        self.entries: dict[fx.Node, GraphInput] = {}
        self.last: fx.Node | None = None
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}
        self.live: dict[fx.Node, Tensor] = {}
        self._scalars: dict[tuple[InputRole, tuple[Any, ...]], Any] = {}
        recorder.on_constant = self._constant

    def placeholder(self, role: InputRole, key: tuple[Any, ...], name: str, value: Any) -> fx.Node:
        """A new input behind those that are there."""
        graph = self.recorder.graph
        if self.last is None:
            node = graph.placeholder(_identifier(role, name))
        else:
            with graph.inserting_after(self.last):
                node = graph.placeholder(_identifier(role, name))
        node.meta["val"] = value
        self.last = node
        self.entries[node] = GraphInput(role, key, name, value)
        return node

    def tensor(
        self, live: Tensor, role: InputRole, key: tuple[Any, ...], name: str, shape: Sequence[int] | None = None
    ) -> Tensor:
        """The fake twin of a live tensor; the same one for the same tensor (tied parameters are one input).

        Args:
            live: the tensor.
            role: what it is for the step.
            key: which of these.
            name: for messages and graphs.
            shape: of the twin, if it is another one.
        """
        known = self._fakes.get(id(live))
        if known is not None:
            return known[1]
        fake = twin_of(live, self.fake_mode, shape)
        self._fakes[id(live)] = (live, fake)
        vars(fake).update(
            {k: v for k, v in vars(live).items() if k not in vars(fake).keys() | private.NAMES_OF_DTENSORS}
        )
        node = self.placeholder(role, key, name, TensorSpec.of(fake))
        self.live[node] = live
        self.recorder.bind(fake, node)
        return fake

    def fresh_tensor(self, spec: TensorSpec, role: InputRole, key: tuple[Any, ...], name: str) -> Tensor:
        """A fake tensor of the given spec that stands for a live one of another (this rank's) shape."""
        return self.stand_in(spec, self.placeholder(role, key, name, spec))

    def stand_in(self, spec: TensorSpec, node: fx.Node) -> Tensor:
        """A new fake tensor for what a node produces."""
        with private.disable_dispatch_modes(), self.fake_mode:
            fake = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
        self.recorder.bind(fake, node)
        return fake

    def scalar(self, value: Number, role: InputRole, key: tuple[Any, ...], name: str) -> Any:
        """A number that stays an input, as SymInt or SymFloat."""
        known = self._scalars.get((role, key))
        if known is None:
            known = HostScalar(value, self.placeholder(role, key, name, value), self.recorder).as_symbol()
            self._scalars[role, key] = known
        return known

    def fake_of(self, live: Tensor) -> Tensor | None:
        """The fake twin of a live tensor that is an input, or None."""
        known = self._fakes.get(id(live))
        return None if known is None else known[1]

    def _constant(self, tensor: Tensor) -> fx.Node:
        if id(tensor) in self._fakes:
            node = self.recorder.node_of(self._fakes[id(tensor)][1])
            name = self.entries[node].name if node in self.entries else "a parameter or buffer"
            raise CaptureError(
                f"{name} is used as an object that was kept somewhere (in an iterator, an object of C) where "
                "the graph cannot follow it; reach it through the module",
                user_location(),
            )
        index = len(self.recorder.constants)
        return self.placeholder(InputRole.CONSTANT, (index,), f"constant {index}", TensorSpec.of(tensor))

    def storages(self) -> set[int]:
        """Identities of the storages of all tensor inputs."""
        return {private.storage_of(fake) for _, fake in self._fakes.values()}

    def live_parameters(self, names: dict[int, str]) -> list[tuple[Tensor, str]]:
        """(live tensor, name) of every parameter that is an input, in the order of ``names``."""
        return [(self._fakes[i][0], name) for i, name in names.items() if i in self._fakes]

    def drop_unused(self, keep: Collection[fx.Node]) -> None:
        """Remove inputs that nothing reads and that are not in ``keep``; the batch stays whole."""
        batch = (InputRole.BATCH, InputRole.SHARED_BATCH)
        for node, entry in list(self.entries.items()):
            if not node.users and node not in keep and entry.role not in batch:
                self.recorder.graph.erase_node(node)
                del self.entries[node]

    def nodes_of(self, role: InputRole) -> set[fx.Node]:
        """The placeholders of a role."""
        return {node for node, entry in self.entries.items() if entry.role is role}

    def in_order(self) -> list[tuple[fx.Node, GraphInput]]:
        """(placeholder, entry) in placeholder order."""
        return [(n, self.entries[n]) for n in self.recorder.graph.nodes if n.op == "placeholder"]


def twin_of(live: Tensor, fake_mode: Any, shape: Sequence[Any] | None = None) -> Tensor:
    """The fake twin of a live tensor; of a sharded one it is the whole.

    Args:
        live: the tensor.
        fake_mode: of the twin.
        shape: of the twin, which is dense, if it is another one: numbers or symbols.
    """
    if shape is not None:
        with private.disable_dispatch_modes(), fake_mode, torch.inference_mode(live.is_inference()):
            return torch.empty(tuple(shape), dtype=live.dtype, device=live.device)
    if not isinstance(live, DTensor):
        if live.is_leaf and live.grad is not None and type(live.grad) is not Tensor:  # it stands for one
            return fake_mode.from_tensor(live.detach(), static_shapes=True).requires_grad_(live.requires_grad)
        return fake_mode.from_tensor(live, static_shapes=True)
    with private.disable_dispatch_modes(), fake_mode, torch.inference_mode(live.is_inference()):
        fake = torch.empty_strided(live.shape, live.stride(), dtype=live.dtype, device=live.device)
        return nn.Parameter(fake, live.requires_grad) if isinstance(live, nn.Parameter) else fake


def _identifier(role: InputRole, name: str) -> str:
    return f"{role.value}_" + "".join(c if c.isalnum() else "_" for c in name)


def global_spec(local: Tensor, rows: int | None) -> TensorSpec:
    """The spec of the global batch tensor of which ``local`` is one rank's part: ``rows`` in dimension 0.

    Memory order (channels last, for instance) is kept; a local tensor that already has ``rows`` rows is taken as it is,
    and so is every one when ``rows`` is None: one device splits nothing.
    """
    if rows is None or local.ndim == 0 or local.shape[0] == rows:
        return TensorSpec.of(local)
    shape = (rows, *local.shape[1:])
    order = sorted(range(local.ndim), key=lambda d: (local.stride(d), -d))
    strides, step = [0] * local.ndim, 1
    for dim in order:
        strides[dim] = step
        step *= shape[dim]
    dense = all(local.stride(d) != 0 for d in range(local.ndim))
    if not dense or local.is_contiguous():
        strides, step = [0] * local.ndim, 1
        for dim in reversed(range(local.ndim)):
            strides[dim] = step
            step *= max(shape[dim], 1)
    return TensorSpec(shape, tuple(strides), local.dtype, local.device)
