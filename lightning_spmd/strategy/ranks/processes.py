"""The part of the strategy about processes: launcher, ranks, collectives."""

from __future__ import annotations

import atexit
import contextlib
import pickle
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError, ConfigurationError
from lightning_spmd.messages import the_step
from lightning_spmd.stages.capture.user_code import user_location
from lightning_spmd.stages.runtime.agreement.control import Place
from lightning_spmd.strategy.notices.advice import advice_on
from lightning_spmd.strategy.ranks.boundary import Launcher, names_lost_ranks
from lightning_spmd.strategy.ranks.ranks import Processes, Ranks
from lightning_spmd.strategy.ranks.rendezvous import NoAnswerError, meet_first, saying_whom
from lightning_spmd.strategy.ranks.slurm import SlurmLauncher, check_tasks, choose_port, meet, step_name
from lightning_spmd.strategy.state.random_state import go_on_alike
from lightning_spmd.strategy.state.replaced_tensors import moving

SECONDS_TO_FINISH = 0.05


def _let_threads_finish() -> None:
    """Give Gloo's threads the interpreter's lock before Python ends.

    Such a thread frees the tensors of the last collective, if nobody else has them, and asks for the lock to do so.
    Where Python is ending it ends the thread instead, and with it the process: "terminate called without an active
    exception", of a training that was done. 3 of 40 processes of torch alone that end with a collective end so.
    """
    time.sleep(SECONDS_TO_FINISH)


class ProcessStrategy(ParallelStrategy):
    """One process per device. The batch is global inside ``training_step``, so its collectives move nothing there.

    Args:
        ranks: this process's knowledge of the other ranks, once they exist.
        process_group_backend: ``"nccl"`` or ``"gloo"``; by default the one for the device.
        timeout: how long a collective may wait for the other ranks.
        kwargs: of Lightning's ``ParallelStrategy``, set by the Trainer.
    """

    def __init__(
        self, ranks: Ranks, process_group_backend: str | None, timeout: timedelta | None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.num_nodes = 1
        self.process_group_backend = process_group_backend
        self.timeout = timeout
        self._ranks = ranks

    # ------------------------------------------------------------------ what Lightning asks by name
    @property
    def is_distributed(self) -> bool:
        """Whether Lightning should sync metrics and split the data set. One device behaves like ``auto``."""
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
        return self._ranks.sampler_arguments(self.num_nodes * self.num_processes, self.global_rank)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of this run, as in ``ModelParallelStrategy``.

        Its axes are ``data_parallel``, ``context_parallel`` and ``tensor_parallel``. Axes of size 1 are left out,
        except for the first.

        Raises:
            ConfigurationError: there are no process groups yet, or there is only one device.
        """
        if self._ranks.mesh is None:
            raise ConfigurationError(
                "there is no device mesh: it is made when the Trainer starts its processes, and one device needs none"
            )
        return self._ranks.mesh.device_mesh

    # ------------------------------------------------------------------ from setup to teardown
    @override
    def _configure_launcher(self) -> None:
        if self.cluster_environment is None:
            raise ConfigurationError("SPMDStrategy has no cluster environment: pass it to Trainer(strategy=...)")
        check_tasks(self.cluster_environment, self.num_processes, self.num_nodes)
        arguments = (lambda: self._ranks.control, self.cluster_environment, self.num_processes, self.num_nodes)
        if isinstance(self.cluster_environment, SLURMEnvironment):
            self._launcher = SlurmLauncher(*arguments)
        elif self.num_processes * self.num_nodes > 1:
            self._launcher = Launcher(*arguments)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._set_world_ranks()
        count = self.num_nodes * self.num_processes
        self._ranks.check(count, self.num_processes)
        if not self.is_distributed:
            return
        backend = self.process_group_backend or private.default_backend(self.root_device)
        device = self.root_device if "nccl" in backend else None
        if self.cluster_environment is None:
            raise ConfigurationError("SPMDStrategy has no cluster environment: pass it to Trainer(strategy=...)")
        with self._meeting(self.cluster_environment):
            private.init_process_group(self.cluster_environment, backend, timeout=self.timeout, device_id=device)
        atexit.unregister(_let_threads_finish)
        atexit.register(_let_threads_finish)
        self._ranks.begin(Processes(count, self.global_rank, self.num_processes, self.root_device, backend))
        if self._ranks.control is not None:
            go_on_alike(self._ranks.control)

    @contextlib.contextmanager
    def _meeting(self, cluster: ClusterEnvironment) -> Iterator[None]:
        """Around the creation of the process group: ranks find each other first, or an error says why they cannot."""
        if isinstance(cluster, SLURMEnvironment) and not dist.is_initialized():
            choose_port()
            address, port = cluster.main_address, cluster.main_port
            _kept_open = meet(address, port, self.global_rank, step_name(), self.timeout)
        try:
            if not isinstance(cluster, SLURMEnvironment) and not dist.is_initialized():
                meet_first(cluster.main_address, cluster.main_port, self.global_rank, self.timeout)
            with self._saying_whom_it_awaits(cluster):
                yield
        except (dist.DistNetworkError, dist.DistStoreError, NoAnswerError) as error:
            # the first rank is listening, and the others do not come
            if self.global_rank == 0 and isinstance(error, dist.DistStoreError):
                raise ConfigurationError(
                    f"rank 0 has waited for the other ranks at {cluster.main_address}, port {cluster.main_port}, in "
                    f"vain ({str(error).splitlines()[0]}): one was not started, or has ended before it came to the "
                    "Trainer's run (its own output says why). On several nodes start the same command on each"
                ) from None
            raise ConfigurationError(
                f"rank {self.global_rank} cannot meet the others at {cluster.main_address}, port {cluster.main_port} "
                f"({str(error).splitlines()[0]}): perhaps the port is in use by another program or run, or rank 0 "
                "never came. Choose another one in the environment of all ranks: MASTER_PORT=..."
            ) from None

    def _saying_whom_it_awaits(self, cluster: ClusterEnvironment) -> contextlib.AbstractContextManager[None]:
        if self.global_rank != 0 or isinstance(cluster, SLURMEnvironment) or dist.is_initialized():
            return contextlib.nullcontext()
        count = self.num_nodes * self.num_processes
        return saying_whom(cluster.main_address, cluster.main_port, count, self.num_processes, self.timeout)

    @override
    def model_to_device(self) -> None:
        if self.model is not None:
            with moving(self.model):
                self.model.to(self.root_device)

    def _set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        private.set_rank_zero_only(self.global_rank)

    @override
    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self._ranks.end()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if (advice := advice_on(exception)) is not None:
            exception.add_note(advice)
        if self._ranks.control is not None:
            self._ranks.control.peers.note(exception)

    # ------------------------------------------------------------------ collectives
    @override
    @names_lost_ranks
    def barrier(self, name: str | None = None) -> None:
        if self.is_distributed and dist.is_initialized():
            self._ranks.refuse_while_traced("barrier")
            if self._ranks.control is not None:
                self._ranks.control.meet(Place(f"the barrier {name!r}" if name else "a barrier"))
            devices = [self.root_device.index] if dist.get_backend() == "nccl" else None
            with private.no_torch_functions(), private.disable_dispatch_modes():
                dist.barrier(device_ids=devices)

    @override
    @names_lost_ranks
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not (self.is_distributed and dist.is_initialized()):
            return obj
        self._ranks.refuse_while_traced("broadcast")
        if self._ranks.control is not None:
            self._ranks.control.meet(Place(f"a broadcast from rank {src}"))
        objects = [pickle.dumps(obj)]  # in a step that is followed this may be the first to ask for values
        with private.no_torch_functions(), private.disable_dispatch_modes():
            dist.broadcast_object_list(objects, src)
        return pickle.loads(objects[0])

    @override
    @names_lost_ranks
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the ranks. Inside ``training_step`` values are global already and are returned unchanged."""
        if isinstance(tensor, Tensor) and self._ranks.traced_split == () and self.is_distributed:
            raise _not_of_all_ranks("strategy.reduce")
        if not isinstance(tensor, Tensor) or self._ranks.traced_split is not None:
            return tensor
        self._ranks.meet("a reduction over all ranks", group)
        return private.reduce_over_ranks(tensor, self._ranks.of_all_batches(group), reduce_op)

    @override
    @names_lost_ranks
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Combine the decisions of all ranks, including those that share a batch."""
        if self._ranks.control is None:
            return decision
        self._ranks.refuse_while_traced("reduce_boolean_decision")
        decision = bool(decision)
        with private.no_torch_functions(), private.disable_dispatch_modes():
            decisions = self._ranks.control.gather(decision, Place("a decision of all ranks"))
        return False not in decisions if all else True in decisions

    @override
    @names_lost_ranks
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of ranks with different batches: inside ``training_step`` a view of the global tensor.

        That view is always differentiable.
        """
        split = self._ranks.traced_split
        if split is None:
            self._ranks.meet("all_gather", group)
            return super().all_gather(tensor, self._ranks.of_all_batches(group), sync_grads)
        if not self.is_distributed:
            return tensor
        if not split:
            raise _not_of_all_ranks("self.all_gather")
        if tensor.ndim == 0 or tensor.shape[0] != sum(split):
            return tensor.unsqueeze(0).expand(len(split), *tensor.shape)
        if len(set(split)) > 1:
            raise CaptureError(
                f"self.all_gather in {the_step()} needs the same number of rows on every rank, not {list(split)}; the "
                "tensor itself has the rows of all ranks already",
                user_location(),
            )
        return tensor.reshape(len(split), split[0], *tensor.shape[1:])


def _not_of_all_ranks(method: str) -> CaptureError:
    return CaptureError(
        f"{the_step()} calls {method} on a batch of this rank's own: there is no batch of all ranks in which it could "
        "be seen (batch='global' has one)",
        user_location(),
    )
