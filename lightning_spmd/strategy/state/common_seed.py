"""The random states with which a run on several ranks begins: those of one device.

Lightning's strategies seed again whenever a Trainer starts its processes. Numbers drawn before (for the module's
initialisation, a split of the data set, an earlier fit) would then repeat, and differ from one device's.
"""

from __future__ import annotations

import os
import zlib

from lightning_spmd.stages.runtime.agreement.control import ControlPlane
from lightning_spmd.strategy.state.random_state import pack_random_state, restore_random_state

_SEED = "PL_GLOBAL_SEED"
"""Where ``seed_everything`` notes the seed."""


def go_on_alike(control: ControlPlane) -> None:
    """Keep the generators' states if they are equal on all ranks; otherwise use rank 0's.

    If nothing was seeded, each rank keeps its own numbers. All ranks call this together.

    Args:
        control: messages among the ranks.
    """
    mine = {**pack_random_state(None), "cuda": None}
    sides = control.gather((zlib.crc32(repr(_comparable(mine)).encode()), _SEED in os.environ))
    if all(side == sides[0] for side in sides) or not sides[0][1]:
        return
    restore_random_state(control.gather(mine if control.rank == 0 else None)[0], None)


def _comparable(state: dict[str, object]) -> dict[str, object]:
    return {key: getattr(value, "tolist", lambda value=value: value)() for key, value in state.items()}
