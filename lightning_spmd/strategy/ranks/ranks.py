"""The ranks of a run: their mesh, process groups and messages, and the plan by which they share work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError, ConfigurationError
from lightning_spmd.ir.steps import Variant
from lightning_spmd.messages import batch_hook, the_step
from lightning_spmd.parallel.axes import AXIS_KINDS, DATA, ParallelOptions
from lightning_spmd.parallel.mesh import Mesh, batch_coordinates, make_mesh, mesh_sizes, shard_size
from lightning_spmd.parallel.parallel_plan import MeshPlan, OwnBatchPlan, ParallelPlan
from lightning_spmd.parallel.shared_groups import Lease, lease_groups, make_host_group
from lightning_spmd.stages.capture.user_code import user_location
from lightning_spmd.stages.runtime.agreement.control import LOOK_AROUND, ControlPlane, Place
from lightning_spmd.stages.runtime.agreement.whereabouts import Lookout
from lightning_spmd.stages.runtime.random_streams import RandomStreams


@dataclass(frozen=True)
class Processes:
    """The processes of a run, one per device.

    Args:
        count: number of processes on all nodes.
        rank: number of this process.
        on_node: processes per node.
        device: of this process.
        backend: of the default process group.
    """

    count: int
    rank: int
    on_node: int
    device: torch.device
    backend: str


class Ranks:
    """What a process knows of the other ranks. One device has neither mesh nor control plane.

    Args:
        options: sizes of the mesh's axes, and how state is placed on them.
        shard_size: number of neighbours on the data axis that share state. ``"auto"``: all of the axis, ``"node"``:
            those on one node.
        timeout: how long a collective may wait for the other ranks.
    """

    def __init__(
        self, options: ParallelOptions, shard_size: int | Literal["auto", "node"], timeout: timedelta | None
    ) -> None:
        self.options = options
        self.shard_size: int | Literal["auto", "node"] = shard_size
        self.timeout = timeout
        self.mesh: Mesh | None = None
        self.control: ControlPlane | None = None
        self.traced_split: tuple[int, ...] | None = None
        self.is_followed = False
        self._processes: Processes | None = None
        self._flat: Mesh | None = None
        self._leases: list[Lease] = []
        self._lookout: Lookout | None = None
        self._metrics: list[Metric] = []

    @property
    def backend(self) -> str:
        """Of the process groups; empty on one device."""
        return "" if self._processes is None else self._processes.backend

    # ------------------------------------------------------------------ from setup to teardown
    def check(self, count: int, on_node: int) -> None:
        """Check that the axes fit the number of processes.

        Raises:
            ConfigurationError: naming the wrong option.
        """
        self._shard_size(mesh_sizes(self.options, count), on_node)

    def begin(self, processes: Processes) -> None:
        """Acquire process groups; all ranks together, under a default process group."""
        self.end()  # those of a Trainer that was never torn down
        self._processes = processes
        sizes = mesh_sizes(self.options, processes.count)
        key, make = self._mesh_wanted(sizes, self._shard_size(sizes, processes.on_node))
        host, self.mesh = self._lease({"host": make_host_group, key: make})
        self.control = ControlPlane(host.group, self.timeout)
        self._lookout = Lookout(self.control.peers.stay_at, LOOK_AROUND)

    def _shard_size(self, sizes: Mapping[str, int], on_node: int) -> int:
        return shard_size(self.shard_size, sizes, on_node, self.options.expert_parallel_size)

    def end(self) -> None:
        """Release the process groups to the next Trainer."""
        if self._lookout is not None:
            self._lookout.end()
            self._lookout = None
        self._flat = None
        while self._leases:
            self._leases.pop().end()
        while self._metrics:
            self._metrics.pop().process_group = None

    def _mesh_wanted(self, sizes: Mapping[str, int], shard: int | None = None) -> tuple[Hashable, Callable[[], Mesh]]:
        """Everything about a mesh, and how it is made."""
        processes = self._processes
        if processes is None:
            raise ConfigurationError("one device has no mesh")
        device, backend = processes.device.type, processes.backend
        arguments = (sizes, processes.rank, device, backend, shard)
        axes = tuple((name, size) for name, size in sizes.items() if size > 1)
        shard = sizes[DATA.name] if shard is None else shard
        return ("mesh", axes, shard, device, backend), lambda: make_mesh(*arguments)

    def _lease(self, wanted: Mapping[Hashable, Callable[[], Any]]) -> list[Any]:
        """Process groups until :meth:`end`, on all ranks together."""
        self._leases.append(lease_groups(wanted, self.timeout))
        return self._leases[-1].owners

    # ------------------------------------------------------------------ the mesh
    def sampler_arguments(self, count: int, rank: int) -> dict[str, Any]:
        """The sampler's arguments: the number of different batches per step, and the index of this rank's batch."""
        replicas, number = batch_coordinates(mesh_sizes(self.options, count), rank)
        return {"num_replicas": replicas, "rank": number}

    def flat_mesh(self) -> Mesh:
        """All ranks as one data-parallel axis; created by all ranks together."""
        if self.mesh is not None and len(self.mesh.sizes) == 1:
            return self.mesh
        if self._flat is None:
            key, make = self._mesh_wanted({DATA.name: 0 if self._processes is None else self._processes.count})
            (flat,) = self._lease({key: make})
            self._flat = flat
            return flat
        return self._flat

    @property
    def batches(self) -> int:
        """Number of different batches per step."""
        return 1 if self.mesh is None else self.mesh.batch_size

    def of_all_batches(self, group: Any | None) -> Any | None:
        """The group for a collective over different batches. One of the ranks that share a batch represents them.

        ``LightningModule.all_gather`` names all ranks if the user names no group.
        """
        mesh = self.mesh
        if mesh is None or not mesh.shares_batches or group not in (None, dist.group.WORLD):
            return group
        return mesh.batch_group()

    def meet(self, what: str, group: Any | None) -> None:
        """Check that all ranks take part. A rank that raised and is still alive breaks no connection.

        Args:
            what: what they are about to do.
            group: the group that does it; a user's own group is not checked.
        """
        if self.control is not None and group in (None, dist.group.WORLD):
            self.control.meet(Place(what))

    def all_of_them(self, holds: bool) -> bool:
        """Whether something holds on every rank; all ranks ask together."""
        if self.control is None:
            return holds
        return not self.control.vote(Place("the end of the hooks on gradients"), 0 if holds else None, 0, 0).missing

    def sync_metrics(self, module: nn.Module) -> None:
        """Until :meth:`end`, reduce metrics over data-parallel ranks only: ranks that share layers saw the same rows.

        Metrics of a collection keep separate states. torchmetrics shares a state between metrics whose states are equal
        after the first batch. On the few rows of a rank that may happen by chance, and they would be counted as one
        from then on.
        """
        if self.mesh is None:
            return
        for part in module.modules():
            if isinstance(part, MetricCollection):
                private.keep_states_apart(part)
            elif isinstance(part, Metric) and part.process_group is None and self.mesh.shares_batches:
                part.process_group = self.mesh.batch_group()
                self._metrics.append(part)

    # ------------------------------------------------------------------ what they share
    def in_words(self) -> dict[str, str]:
        """Mesh and plan in words, for users."""
        if self.mesh is None:
            return {"mesh": "one device"}
        options = self.options
        plan = f"data_parallel='{options.data_parallel}'"
        if options.expert_parallel_size > 1:
            plan += f", experts on {options.expert_parallel_size} ranks each"
        elif self.mesh.shard != self.mesh.size(DATA.name):
            plan += f", chunks on {self.mesh.shard} ranks each"
        return {"mesh": ", ".join(f"{name} {size}" for name, size in self.mesh.sizes.items()), "plan": plan}

    def plan(self, variant: Variant) -> ParallelPlan:
        """The parallel plan of a variant's graph."""
        plans = {
            kind.name: kind.plan(self.options, variant.expose_gradients)
            for kind in AXIS_KINDS
            if kind is DATA or kind.size(self.options) != 1
        }
        if variant.own_batch:
            plans[DATA.name] = OwnBatchPlan(plans[DATA.name])
        return MeshPlan(plans) if len(plans) > 1 else plans[DATA.name]

    def streams(self, seed: int) -> RandomStreams | None:
        """Random streams of this rank, from a seed that all ranks share; None on one device, which draws as torch."""
        if self.mesh is None or self._processes is None:
            return None
        coordinates = self.mesh.coordinates_of_parts
        return RandomStreams(seed, coordinates if len(coordinates) > 1 else self._processes.rank)

    # ------------------------------------------------------------------ while a step is traced, or followed
    @contextlib.contextmanager
    def tracing(self, split: tuple[int, ...]) -> Iterator[None]:
        """A context for tracing training_step: it sees the global batch, and compiled submodules run as written.

        Args:
            split: rows of each part of the global batch.
        """
        self.traced_split = split
        torch.compiler.set_stance("force_eager")
        try:
            yield
        finally:
            self.traced_split = None
            torch.compiler.set_stance("default")

    @contextlib.contextmanager
    def followed(self, split: tuple[int, ...]) -> Iterator[None]:
        """A context for the Python of a followed step: it sees the global batch.

        Args:
            split: rows of each part of the global batch.
        """
        self.traced_split, self.is_followed = split, True
        try:
            yield
        finally:
            self.traced_split, self.is_followed = None, False

    def refuse_while_traced(self, method: str) -> None:
        """Refuse an exchange outside of the graph during capture, because it would happen only once."""
        if self.traced_split is not None and not self.is_followed:
            raise CaptureError(
                f"{the_step()} calls strategy.{method}, which would happen once, at capture, and never again; call it "
                f"in a hook such as {batch_hook('start')}",
                user_location(),
            )
