"""Which tensors of the batch are the same for every sample: they are not split into rows.

Shapes cannot always tell. Class weights of length 4 beside 4 rows a rank look like rows; as rows of the global batch
they would be repeated once a rank. So before a graph is built the ranks compare their leaves. What is the same on all
of them while other leaves differ is either such a tensor, or rows that happen to be equal. The step itself decides: it
is traced both ways, and mostly one of them does not fit (eight weights for four classes; four targets for eight rows).

Tensors without dimensions are never rows. Whatever is not split must be the same on all ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence

from lightning_spmd.errors import BatchError, SPMDError
from lightning_spmd.messages import tell, warn
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.stages.runtime.agreement.control import ControlPlane

Trace = Callable[[Collection[str]], object]
"""Traces the step, with leaves at these paths taken as a whole."""
_MOST_TRIALS = 32


def check_shared(control: ControlPlane, batch: Batch) -> None:
    """Compare what is the same for every sample.

    Raises:
        BatchError: on every rank; it is not.
    """
    digests = dict(zip(batch.tensors, batch.digests(), strict=True))
    mine = {batch.paths[i]: digests[i] for i in batch.tensors if batch.is_shared(i)}
    sides = control.gather(mine)
    for path in mine:
        rank = next((r for r, side in enumerate(sides) if side.get(path) != sides[0].get(path)), None)
        if rank is not None:
            why = "the step takes it as a whole" if path in batch.shared else "it has no dimension"
            raise BatchError(
                f"batch{path} belongs to no sample ({why}), so it must be the same on all ranks, but on "
                f"ranks 0 and {rank} it differs; give it one entry a sample, along dimension 0",
                is_ragged=True,
            )


def find_shared(control: ControlPlane, batch: Batch, trace: Trace) -> set[str]:
    """Paths of leaves that look like rows and are the same for every sample; the same answer on all ranks.

    Args:
        control: reaches the other ranks.
        batch: this rank's batch.
        trace: raises where the step does not fit.
    """
    split = [i for i in batch.tensors if not batch.is_shared(i)]
    digests = dict(zip(batch.tensors, batch.digests(), strict=True))
    sides = control.gather([digests[i] for i in split])
    alike = [batch.paths[i] for i, seen in zip(split, zip(*sides, strict=True), strict=True) if len(set(seen)) == 1]
    if not alike or len(alike) == len(split):
        return set()

    def fits(shared: Collection[str]) -> bool:
        return all(control.gather(_succeeds(trace, {*batch.shared, *shared})))

    as_rows = fits(())
    found = set[str]() if as_rows else _smallest(alike, fits)
    doubtful = [path for path in alike if as_rows and not _is_one_row(batch, path) and fits([path])]
    for path in doubtful:
        warn(
            f"batch{path} is the same on all ranks and has as many entries as they have rows; it is taken for rows of "
            "the batch. Where it is the same for every sample (class weights), keep it on the module instead"
        )
    for path in sorted(found):
        tell(f"strategy='spmd' takes batch{path} as a whole, not as rows: it is the same on all ranks")
    return found


def _smallest(paths: Sequence[str], fits: Callable[[Collection[str]], bool]) -> set[str]:
    """The fewest leaves that must be taken as a whole for the step to fit; none where there are two ways."""
    trials = 0
    for size in range(1, len(paths) + 1):
        trials += math.comb(len(paths), size)
        if trials > _MOST_TRIALS:
            break
        ways = [set(chosen) for chosen in itertools.combinations(paths, size) if fits(chosen)]
        if ways:
            return ways[0] if len(ways) == 1 else set()
    return set()


def _is_one_row(batch: Batch, path: str) -> bool:
    """Whether a leaf is a row of several numbers (the mask of one sequence): broadcast or not, it means the same."""
    shape = batch.values[batch.paths.index(path)].shape
    return len(shape) > 1 and shape[0] == 1


def _succeeds(trace: Trace, shared: Collection[str]) -> bool:
    try:
        trace(shared)
    except SPMDError:
        return False
    return True
