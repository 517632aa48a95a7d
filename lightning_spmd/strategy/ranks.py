"""What Lightning asks of a strategy with several processes: ranks, launcher, process groups, collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics import Metric
from typing_extensions import override

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError, ConfigurationError, RankLostError
from lightning_spmd.parallel.axes import DATA, ParallelOptions
from lightning_spmd.parallel.mesh import Mesh, batch_coordinates, make_mesh, mesh_sizes, shard_size
from lightning_spmd.parallel.shared_groups import Lease, lease_groups, make_host_group
from lightning_spmd.stages.capture.user_code import user_location
from lightning_spmd.stages.runtime.control import ControlPlane, Place
from lightning_spmd.stages.runtime.peers import is_communication_failure
from lightning_spmd.strategy.boundary import names_lost_ranks


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
        self._traced_split: tuple[int, ...] | None = None
        self._leases: list[Lease] = []
        self._metrics: list[Metric] = []

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
        """The mesh of this run, as ``ModelParallelStrategy`` has it.

        Its axes are ``data_parallel``, ``context_parallel``, ``tensor_parallel``; one of a single rank is left out, but
        for the first.

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
        key, make = self._mesh_wanted({DATA.name: self.world_size})
        return self._lease({key: make})[0]

    def _mesh_wanted(self, sizes: Mapping[str, int], shard: int | None = None) -> tuple[Hashable, Callable[[], Mesh]]:
        """Everything about a mesh, and how it is made."""
        backend = self.process_group_backend or private.default_backend(self.root_device)
        arguments = (sizes, self.global_rank, self.root_device.type, backend, shard)
        axes = tuple((name, size) for name, size in sizes.items() if size > 1)
        shard = sizes[DATA.name] if shard is None else shard
        return ("mesh", axes, shard, self.root_device.type, backend), lambda: make_mesh(*arguments)

    def _lease(self, wanted: Mapping[Hashable, Callable[[], Any]]) -> list[Any]:
        """Process groups until teardown, on all ranks together."""
        self._leases.append(lease_groups(wanted, self.timeout))
        return self._leases[-1].owners

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
        self._end_leases()  # of a Trainer that was never torn down
        key, make = self._mesh_wanted(sizes, shard)
        host, self._mesh = self._lease({"host": make_host_group, key: make})
        self._control = ControlPlane(host.group)

    def _end_leases(self) -> None:
        while self._leases:
            self._leases.pop().end()
        while self._metrics:
            self._metrics.pop().process_group = None

    def _sync_metrics(self, module: nn.Module, group: Any) -> None:
        """Until teardown metrics add up what data-parallel ranks saw: ranks that share layers saw the same."""
        for part in module.modules():
            if isinstance(part, Metric) and part.process_group is None:
                part.process_group = group
                self._metrics.append(part)

    @override
    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self._end_leases()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Tell the others why this rank ends; and if that is because of one of them, say so where nobody else could."""
        super().on_exception(exception)
        control = self._control
        if control is None:
            return
        if is_communication_failure(exception) and not isinstance(exception, RankLostError):
            exception.add_note(str(control.peers.explain(exception, str(control.place))))
        control.peers.note(exception)

    def _set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        private.set_rank_zero_only(self.global_rank)

    @contextlib.contextmanager
    def _tracing(self, split: tuple[int, ...]) -> Iterator[None]:
        """While training_step is traced: it sees the global batch, and compiled submodules run as written.

        Args:
            split: rows of each batch that is a part of it.
        """
        self._traced_split = split
        torch.compiler.set_stance("force_eager")
        # torch's own LSTM instead of oneDNN's, which cannot be captured; one device keeps eager's and runs eagerly
        native = torch.backends.mkldnn.flags(enabled=False) if self.is_distributed else contextlib.nullcontext()
        try:
            with native:
                yield
        finally:
            self._traced_split = None
            torch.compiler.set_stance("default")

    # ------------------------------------------------------------------ collectives
    @override
    @names_lost_ranks
    def barrier(self, name: str | None = None) -> None:
        if self.is_distributed and dist.is_initialized():
            self._refuse_while_traced("barrier")
            if self._control is not None:
                self._control.meet(Place(f"the barrier {name!r}" if name else "a barrier"))
            devices = [self.root_device.index] if dist.get_backend() == "nccl" else None
            dist.barrier(device_ids=devices)

    @override
    @names_lost_ranks
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not (self.is_distributed and dist.is_initialized()):
            return obj
        self._refuse_while_traced("broadcast")
        if self._control is not None:
            self._control.meet(Place(f"a broadcast from rank {src}"))
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    @override
    @names_lost_ranks
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the ranks; inside training_step values are global already and come back as they are."""
        if not isinstance(tensor, Tensor) or self._traced_split is not None:
            return tensor
        return private.reduce_over_ranks(tensor, self._of_all_batches(group), reduce_op)

    @override
    @names_lost_ranks
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """What all ranks decide, those that have the same batch included: each of them acts on it."""
        if self._control is None:
            return decision
        self._refuse_while_traced("reduce_boolean_decision")
        decisions = self._control.gather(bool(decision), Place("a decision of all ranks"))
        return False not in decisions if all else True in decisions

    @override
    @names_lost_ranks
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of ranks with different batches: inside training_step a view of the global tensor.

        That view is differentiable by nature.
        """
        split = self._traced_split
        if split is None:
            return super().all_gather(tensor, self._of_all_batches(group), sync_grads)
        if not self.is_distributed:
            return tensor
        if tensor.ndim == 0 or tensor.shape[0] != sum(split):
            return tensor.unsqueeze(0).expand(len(split), *tensor.shape)
        if len(set(split)) > 1:
            raise CaptureError(
                f"self.all_gather in training_step needs the same number of rows on every rank, not {list(split)}; the "
                "tensor itself has the rows of all ranks already",
                user_location(),
            )
        return tensor.reshape(len(split), split[0], *tensor.shape[1:])

    def _refuse_while_traced(self, method: str) -> None:
        """What the ranks exchange beside the graph would be exchanged once, at capture."""
        if self._traced_split is not None:
            raise CaptureError(
                f"training_step calls strategy.{method}, which would happen once, at capture, and never again; call it "
                "in a hook such as on_train_batch_start",
                user_location(),
            )

    def _of_all_batches(self, group: Any | None) -> Any | None:
        """The group that a collective should run in: where ranks have the same batch, one of them stands for it.

        ``LightningModule.all_gather`` names all ranks where nobody named a group.
        """
        mesh = self._mesh
        if mesh is None or not mesh.shares_batches or group not in (None, dist.group.WORLD):
            return group
        return mesh.batch_group()

    @property
    def batches(self) -> int:
        """Number of different batches a step."""
        return 1 if self._mesh is None else self._mesh.batch_size
