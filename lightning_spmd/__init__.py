"""lightning_spmd: ``Trainer(strategy="spmd")`` trains an unmodified LightningModule as one distributed graph.

Map, in the direction of the data::

    cli/, examples/     the command line, complete models and data
    strategy/           Lightning's hooks in, hooks out
    stages/capture/     the user's calls + optimizer + batch → one graph, as one device would run it
    stages/expand/      that graph + mesh → this rank's graph
    stages/passes/      this rank's graph → the same with fewer, fused and bucketed operators
    stages/phases/      this rank's graph → setup, main, cleanup
    stages/runtime/     graphs + live parameters + batch → loss, logged values
    ir/                 what the stages exchange
    parallel/, cost/    mesh and plans; predicted times and memory
    planning/, report/  plans without devices, comparisons, generated tables

Importing this package registers the strategy ``"spmd"`` with Lightning and does nothing else.
"""

import lightning_spmd.early_signals  # noqa: F401  (first: a signal during the imports below must not end the job)

# isort: split
from lightning.pytorch.strategies import StrategyRegistry

from lightning_spmd.errors import (
    BatchError,
    CaptureError,
    ConfigurationError,
    ExpansionError,
    RankDisagreementError,
    RankLostError,
    SPMDError,
    VerificationError,
)
from lightning_spmd.strategy.graphs.run_context import BuildEvent
from lightning_spmd.strategy.notices.step_statistics import StepStatistics
from lightning_spmd.strategy.ranks.requeue import leave_signals_to_other_strategies
from lightning_spmd.strategy.spmd_strategy import SPMDStrategy
from lightning_spmd.strategy.support.foreign_lightning import explain_in_pytorch_lightning

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "BuildEvent",
    "CaptureError",
    "ConfigurationError",
    "ExpansionError",
    "RankDisagreementError",
    "RankLostError",
    "SPMDError",
    "SPMDStrategy",
    "StepStatistics",
    "VerificationError",
    "__version__",
]

StrategyRegistry.register(
    "spmd",
    SPMDStrategy,
    description="The whole training iteration as one distributed graph, parameters replicated",
    override=True,
)
StrategyRegistry.register(
    "spmd_zero2",
    SPMDStrategy,
    description="As spmd, with gradients and optimizer state sharded over the devices",
    override=True,
    data_parallel="zero2",
)
StrategyRegistry.register(
    "spmd_zero3",
    SPMDStrategy,
    description="As spmd, with parameters, gradients and optimizer state sharded over the devices",
    override=True,
    data_parallel="zero3",
)
explain_in_pytorch_lightning()
leave_signals_to_other_strategies()
