"""Process groups for two processes on one GPU, which NCCL refuses: every collective goes through the host, by Gloo.

Slow, and in order with the GPU's stream: what it sends has been computed, and what it brings is there behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "through_host"


def register() -> None:
    """Make the backend known to ``torch.distributed``; once a process."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _made, devices=["cpu", "cuda"])


class ThroughHost(dist.ProcessGroup):
    """A process group whose collectives are those of a Gloo group on copies in the host's memory.

    Args:
        store: of the group.
        rank: this process.
        size: number of processes.
        timeout: of a collective.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        """For messages."""
        return NAME

    @property
    def pg_name(self) -> str:
        """The name under which torch knows the group."""
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        """The same."""
        return self.pg_name

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._on_host("allreduce", tensors, tensors, lambda t: (t,), opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self._each([self.allreduce([t], _like(dist.AllreduceOptions(), opts)) for t in tensors])

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self._on_host("broadcast", tensors, tensors, lambda t: (t,), opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        host = [t.cpu() for t in inputs]
        places = [[torch.empty_like(t, device="cpu") for t in some] for some in outputs]
        self._gloo.allgather(places, host).wait()
        for some, found in zip(outputs, places, strict=True):
            _put(some, found)
        return _done()

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.allgather([list(output.view(-1).chunk(self.size()))], [given.reshape(-1)])

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._each([self._allgather_base(o, i) for o, i in zip(outputs, inputs, strict=True)])

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        whole = given.cpu()  # Gloo has no other way either
        self._gloo.allreduce([whole], _like(dist.AllreduceOptions(), opts)).wait()
        output.copy_(whole.view(-1).chunk(self.size())[self.rank()].view_as(output))
        return _done()

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._each([self._reduce_scatter_base(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    def alltoall_base(self, output: Tensor, given: Tensor, outgoing: Any, incoming: Any, opts: Any = None) -> Any:
        host, place = given.cpu(), torch.empty_like(output, device="cpu")
        self._gloo.alltoall_base(place, host, outgoing, incoming).wait()
        output.copy_(place)
        return _done()

    def barrier(self, opts: Any = None) -> Any:
        self._gloo.barrier().wait()
        return _done()

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._gloo.gather(outputs, inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._gloo.scatter(outputs, inputs, opts)

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        return self._gloo.send(tensors, to, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        return self._gloo.recv(tensors, source, tag)

    def _on_host(self, name: str, given: Any, results: Any, arguments: Any, opts: Any) -> Any:
        host = [t.cpu() if t.is_cuda else t.contiguous() for t in given]
        more = () if opts is None else (opts,)
        getattr(self._gloo, name)(*arguments(host), *more).wait()
        _put(results, host)
        return _done()

    def _each(self, works: Sequence[Any]) -> Any:
        return works[-1] if works else _done()


def _made(store: Any, rank: int, size: int, timeout: timedelta) -> ThroughHost:
    return ThroughHost(store, rank, size, timeout)


def _like(opts: Any, given: Any) -> Any:
    if given is not None:
        opts.reduceOp = given.reduceOp
    return opts


def _put(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        if place is not value:
            place.copy_(value)


def _done() -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result([])  # with a GPU's tensors it would have to know the device
    return torch._C._distributed_c10d._create_work_from_future(future)
