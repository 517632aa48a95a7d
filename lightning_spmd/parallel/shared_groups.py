"""Process groups shared by the Trainers of a process, so that many fits need no more than one.

A group costs three threads, five sockets (gloo, two ranks) and 20 ms. It cannot end with its Trainer, because sharded
parameters stay DTensors on its mesh. So the groups of a layout live as long as the default process group, and Trainers
of one layout use them one after the other, or nested.

The next Trainer takes over groups only if no collective hangs in them. After an exception on one rank alone, a
collective may still wait there and would meet a collective of the next Trainer. So all ranks compare how many
collectives each has begun in each group, and reduce one number on it. A group that fails is ended and replaced, also
for the tensors on it (``mesh.known_mesh``).
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError, RankDisagreementError

# Groups that work answer within a millisecond; all ranks ask at once, for they have just exchanged messages.
PATIENCE = timedelta(seconds=20)
# Seconds between looks whether a Trainer that holds an ended group has been collected.
_LOOK_AGAIN = 0.1


class GroupOwner(Protocol):
    """An object with process groups of its own."""

    def groups(self) -> Mapping[str, Any]:
        """This rank's process groups, by names that are the same on all ranks."""
        ...


@dataclass(frozen=True)
class HostGroup:
    """All ranks, for messages among hosts.

    Args:
        group: a gloo process group.
    """

    group: Any

    def groups(self) -> Mapping[str, Any]:
        """The one group."""
        return {"host": self.group}


def make_host_group() -> HostGroup:
    """Make it on all ranks together."""
    return HostGroup(dist.new_group(backend="gloo"))


@dataclass(eq=False)
class Lease:
    """The groups that one Trainer uses, from setup to teardown.

    Args:
        timeout: of the groups' collectives while this is the youngest active lease.
        kept: the groups.
    """

    timeout: timedelta
    kept: list[_Kept] = field(default_factory=list)

    @property
    def owners(self) -> list[Any]:
        """The requested owners, in order."""
        return [kept.owner for kept in self.kept]

    def end(self) -> None:
        """The groups stay, with the timeout of the Trainer around this one, if there is one."""
        for kept in self.kept:
            if self in kept.leases:
                kept.leases.remove(self)
                kept.set_timeout()


@dataclass(eq=False)
class _Kept:
    owner: GroupOwner
    leases: list[Lease] = field(default_factory=list)

    def set_timeout(self) -> None:
        if self.leases:
            for group in self.owner.groups().values():
                group.set_timeout(self.leases[-1].timeout)

    def begun(self) -> dict[tuple[str, tuple[int, ...]], int]:
        """Collectives that this rank has begun in each group, by name and ranks."""
        groups = self.owner.groups().items()
        return {(name, tuple(dist.get_process_group_ranks(g))): private.collectives_begun(g) for name, g in groups}

    def answers(self) -> bool:
        """Whether a small collective completes in each group. If it does not, NCCL ends the process."""
        found = True
        options = dist.AllreduceOptions()
        options.timeout = PATIENCE
        for group in self.owner.groups().values():
            if dist.get_backend(group) == "gloo":
                try:
                    group.allreduce([torch.zeros(1)], options).wait()
                except RuntimeError:
                    found = False
        return found


def _end(groups: list[Any]) -> None:
    """End groups when no other owner holds them, in a separate thread.

    What waits for a rank which never came ends when that rank ends the group too, or by its timeout. Until then the
    destructor waits: were it called by the garbage collector, in the middle of a step, the other rank would wait for
    this one and never come to collect its own.
    """
    for i in range(len(groups)):  # a name for each would hold the last one
        dist.destroy_process_group(groups[i])
    while groups:
        for i in reversed(range(len(groups))):
            if sys.getrefcount(groups[i]) <= 2:  # the list and the call
                del groups[i]
        time.sleep(_LOOK_AGAIN)


class _Pool:
    """The groups made under one default process group."""

    def __init__(self) -> None:
        self.kept: dict[Hashable, _Kept] = {}
        self.store = private.default_store()
        self.messages = 0
        self.timeout = timedelta()

    def lease(self, wanted: Mapping[Hashable, Callable[[], GroupOwner]], timeout: timedelta) -> Lease:
        self.timeout = timeout
        self._retire_what_hangs(list(wanted))
        lease = Lease(timeout)
        for key, make in wanted.items():
            if key not in self.kept:
                self.kept[key] = _Kept(make())
            kept = self.kept[key]
            kept.leases.append(lease)
            lease.kept.append(kept)
            kept.set_timeout()
        return lease

    def _retire_what_hangs(self, keys: list[Hashable]) -> None:
        told = [(repr(key), self.kept[key].begun() if key in self.kept else None) for key in keys]
        everyone = self._gather(told)
        if any([name for name, _ in other] != [name for name, _ in told] for other in everyone):
            raise ConfigurationError(f"the ranks' Trainers are of different layouts: {everyone}")
        for key, *sides in zip(keys, *everyone, strict=True):
            if not _agree([begun for _, begun in sides]):
                self._retire(key)
        left = [key for key in keys if key in self.kept]
        if left:
            for key, *answers in zip(left, *self._gather([self.kept[key].answers() for key in left]), strict=True):
                if not all(answers):
                    self._retire(key)

    def _gather(self, value: Any) -> list[Any]:
        """Every rank's value.

        Not through the default process group: where another rank is still in an earlier Trainer, whose collectives
        Lightning puts there, ours would meet them.
        """
        names = [f"lightning_spmd/{self.messages}/{rank}" for rank in range(dist.get_world_size())]
        self.store.set(names[dist.get_rank()], pickle.dumps(value))
        try:
            self.store.wait(names, self.timeout)
        except dist.DistStoreError:
            missing = [rank for rank, name in enumerate(names) if not self.store.check([name])]
            raise RankDisagreementError(
                f"ranks {missing} have not begun to set up this Trainer after {self.timeout}: they may have ended, or "
                "wait in a Trainer that failed on other ranks alone"
            ) from None
        # everybody has read what came before
        self.store.delete_key(f"lightning_spmd/{self.messages - 1}/{dist.get_rank()}")
        self.messages += 1
        return [pickle.loads(self.store.get(name)) for name in names]

    def _retire(self, key: Hashable) -> None:
        kept = self.kept.pop(key, None)
        if kept is not None:
            groups = list(kept.owner.groups().values())
            threading.Thread(target=_end, args=(groups,), name="end of process groups", daemon=True).start()


def _agree(sides: Sequence[dict[tuple[str, tuple[int, ...]], int] | None]) -> bool:
    """Whether all ranks have the groups, and those of a group have begun the same number of collectives in it."""
    counts: dict[Any, list[int]] = {}
    for side in sides:
        for group, begun in (side or {}).items():
            counts.setdefault(group, []).append(begun)
    complete = all(len(begun) == len(ranks) and len(set(begun)) == 1 for (_, ranks), begun in counts.items())
    return complete and None not in sides


_POOLS: weakref.WeakKeyDictionary[Any, _Pool] = weakref.WeakKeyDictionary()
"""By default process group: groups end with it."""


def lease_groups(wanted: Mapping[Hashable, Callable[[], Any]], timeout: timedelta | None) -> Lease:
    """The groups of a Trainer, created by all ranks together or taken over from earlier Trainers.

    Args:
        wanted: for each key, which describes everything but the timeout, a function that creates a :class:`GroupOwner`.
        timeout: of the collectives of this Trainer.

    Returns:
        the lease, whose ``owners`` are what was wanted, in order.

    Raises:
        ConfigurationError: on all ranks, if they want different ones.
        RankDisagreementError: other ranks create no Trainer within ``timeout``.
    """
    world: Any = dist.group.WORLD
    pool = _POOLS.setdefault(world, _Pool())
    return pool.lease(wanted, private.default_process_group_timeout if timeout is None else timeout)
