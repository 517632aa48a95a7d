"""What Lightning asks of a strategy with several processes: ranks, launcher, process groups, collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError, ConfigurationError
from lightning_spmd.parallel.axes import DATA, ParallelOptions
from lightning_spmd.parallel.mesh import Mesh, batch_coordinates, make_mesh, mesh_sizes, shard_size
from lightning_spmd.stages.runtime.agreement import ControlPlane


class RankedStrategy(ParallelStrategy):
    """One process a device. Inside ``training_step`` its collectives see the global batch, which needs none.

    Args:
        process_group_backend: ``"nccl"`` or ``"gloo"``; by default the one for the device.
        timeout: how long a collective may wait for the other ranks.
        parallel_options: sizes of the mesh's axes and how things lie on them.
        data_parallel_shard_size: neighbours on the data axis among which state is split, ``"auto"``: all of the axis,
            ``"node"``: those on one node.
        kwargs: those of Lightning's ``ParallelStrategy``, set by the Trainer.
    """

    def __init__(
        self,
        process_group_backend: str | None,
        timeout: timedelta | None,
        parallel_options: ParallelOptions,
        data_parallel_shard_size: int | Literal["auto", "node"] = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.parallel_options = parallel_options
        self.data_parallel_shard_size: int | Literal["auto", "node"] = data_parallel_shard_size
        self.num_nodes = 1
        self.process_group_backend = process_group_backend
        self.timeout = timeout
        self._control: ControlPlane | None = None
        self._mesh: Mesh | None = None
        self._tracing_rows: int | None = None

    # ------------------------------------------------------------------ what Lightning asks by name
    @property
    def is_distributed(self) -> bool:
        """Whether Lightning should sync metrics and split the data set; on one device nothing differs from ``auto``."""
        return self.num_processes * self.num_nodes > 1

    @property
    @override
    def root_device(self) -> torch.device:
        if self.parallel_devices is None:
            raise ConfigurationError("SPMDStrategy has no devices yet: pass it to Trainer(strategy=...)")
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node, one a device."""
        return 0 if self.parallel_devices is None else len(self.parallel_devices)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        replicas, rank = batch_coordinates(self._mesh_sizes(), self.global_rank)
        return {"num_replicas": replicas, "rank": rank}

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of this run, as ``ModelParallelStrategy`` has it: axes ``data_parallel``, ``tensor_parallel``.

        An axis of one rank is left out, but for the first.

        Raises:
            ConfigurationError: before the process groups are there, and on one device.
        """
        if self._mesh is None:
            raise ConfigurationError(
                "there is no device mesh: it is made when the Trainer starts its processes, and one device needs none"
            )
        return self._mesh.device_mesh

    def _flat_mesh(self) -> Mesh:
        """All ranks as one data-parallel axis."""
        mesh = self._mesh
        if mesh is None:
            raise ConfigurationError("one device has no mesh")
        if len(mesh.sizes) == 1:
            return mesh
        backend = self.process_group_backend or private.default_backend(self.root_device)
        return make_mesh({DATA.name: self.world_size}, mesh.rank, self.root_device.type, backend, self.timeout)

    def _mesh_sizes(self) -> dict[str, int]:
        return mesh_sizes(self.parallel_options, self.num_nodes * self.num_processes)

    @override
    def _configure_launcher(self) -> None:
        if self.cluster_environment is None:
            raise ConfigurationError("SPMDStrategy has no cluster environment: pass it to Trainer(strategy=...)")
        if self.num_processes * self.num_nodes > 1:
            self._launcher = private.SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._set_world_ranks()
        sizes = self._mesh_sizes()
        shard = shard_size(self.data_parallel_shard_size, sizes, self.num_processes)
        if not self.is_distributed:
            return  # nor reset_seed(): one device draws the numbers that strategy="auto" draws
        reset_seed()
        backend = self.process_group_backend or private.default_backend(self.root_device)
        device = None if self.root_device.type == "cpu" else self.root_device
        if self.cluster_environment is None:
            raise ConfigurationError("SPMDStrategy has no cluster environment: pass it to Trainer(strategy=...)")
        private.init_process_group(self.cluster_environment, backend, timeout=self.timeout, device_id=device)
        if self._control is None:
            self._control = ControlPlane(self.timeout)
            device_type = self.root_device.type
            self._mesh = make_mesh(sizes, self.global_rank, device_type, backend, self.timeout, shard)

    def _set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        private.set_rank_zero_only(self.global_rank)

    @contextlib.contextmanager
    def _tracing(self, rows: int) -> Iterator[None]:
        """While training_step is traced: it sees the global batch, and compiled submodules run as written."""
        self._tracing_rows = rows
        torch.compiler.set_stance("force_eager")
        # torch's own LSTM instead of oneDNN's, which cannot be captured; one device keeps eager's and runs eagerly
        native = torch.backends.mkldnn.flags(enabled=False) if self.is_distributed else contextlib.nullcontext()
        try:
            with native:
                yield
        finally:
            self._tracing_rows = None
            torch.compiler.set_stance("default")

    # ------------------------------------------------------------------ collectives
    @override
    def barrier(self, name: str | None = None) -> None:
        if self.is_distributed and dist.is_initialized():
            devices = [self.root_device.index] if dist.get_backend() == "nccl" else None
            dist.barrier(device_ids=devices)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not (self.is_distributed and dist.is_initialized()):
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the ranks; inside training_step values are global already and come back as they are."""
        if not isinstance(tensor, Tensor) or self._tracing_rows is not None:
            return tensor
        if group is None and self._mesh is not None and self._mesh.shares_batches:
            group = self._mesh.batch_group()  # the others hold the same value
        return private.reduce_over_ranks(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack the ranks' tensors; inside training_step a view of the global tensor, differentiable by nature."""
        rows = self._tracing_rows
        if rows is None:
            return super().all_gather(tensor, group, sync_grads)
        if not self.is_distributed:
            return tensor
        if tensor.ndim == 0 or tensor.shape[0] != rows:
            return tensor.unsqueeze(0).expand(self.world_size, *tensor.shape)
        if rows % self.world_size:
            raise CaptureError("self.all_gather in training_step needs the same number of rows on every rank")
        return tensor.reshape(self.world_size, rows // self.world_size, *tensor.shape[1:])
