"""The mode of a fit: decided by all ranks together, and again when hooks are added later."""

from __future__ import annotations

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.messages import tell
from lightning_spmd.stages.runtime.agreement.control import ControlPlane, Place
from lightning_spmd.strategy.support.detectors import Context, gradient_hooks
from lightning_spmd.strategy.support.eager_semantics import averaged
from lightning_spmd.strategy.support.feature import Mode
from lightning_spmd.strategy.support.matrix import classify

_IN_WORDS = {
    Mode.COMPILED: "as one graph",
    Mode.SPLIT: "split, as a graph up to the gradients and one of the update",
    Mode.EAGER: "eagerly",
}

_PAUSES = "as one graph, which pauses for hooks before its update"


class ModeOfRun:
    """The mode of the fits of a strategy."""

    def __init__(self) -> None:
        self._told: Mode | None = None
        self._chosen, self._step_hooks, self._pauses = Mode.EAGER, False, False

    def begin(self) -> None:
        """Begin a new fit."""
        self._told = None

    def of_all_ranks(
        self,
        context: Context,
        control: ControlPlane | None,
        in_parts: str,
        updates: str = "plain",
        *,
        may_pause: bool = False,
    ) -> tuple[Mode, bool, bool]:
        """The mode of a run: the worst that any rank finds, since ``wandb.watch`` hooks the modules of rank 0 only.

        Args:
            context: the detectors' input.
            control: the other ranks; None on one device.
            in_parts: the options to change so that a rank has whole layers and state, as eager training needs; empty if
                it has.
            updates: how bfloat16 weights are updated; only graphs know more than one way.
            may_pause: whether graphs can pause for hooks; equal on all ranks.

        Returns:
            the mode, SPLIT also where an iteration is one graph that pauses; whether ``optimizer.step()`` itself must
            run, for its hooks; and whether graphs pause.

        Raises:
            ConfigurationError: this cannot be trained.
        """
        mode, findings = classify(context)
        reasons = [str(finding) for finding in findings]
        step_hooks = any(f.feature.name == "optimizer step hooks" for f in findings)
        on_gradients = all(f.feature.detect is gradient_hooks for f in findings)
        if control is not None:
            everyone = control.gather((mode, reasons, step_hooks, on_gradients), Place("the choice of how to train"))
            mode, reasons, _, _ = max(everyone, key=lambda found: list(Mode).index(found[0]))
            step_hooks = any(found[2] for found in everyone)
            on_gradients = all(found[3] for found in everyone)
        if mode is Mode.REJECTED:
            raise ConfigurationError(f"strategy='spmd' cannot train this: {reasons[0]}")
        if mode is Mode.EAGER and in_parts:
            raise ConfigurationError(
                "state in parts on the ranks needs training in graphs, and this training runs eagerly: "
                f"{reasons[0]}. Change that, or use {in_parts}"
            )
        if updates != "plain" and (mode is Mode.EAGER or step_hooks):
            raise ConfigurationError(
                f"bf16_updates={updates!r} needs updates in graphs, and this training runs them eagerly: {reasons[0]}. "
                "Change that, or leave bf16_updates out"
            )
        pauses = may_pause and mode is Mode.SPLIT and on_gradients
        if reasons and mode is not self._told:
            semantics = averaged(context.module) if mode is Mode.EAGER and control is not None else ""
            how = _PAUSES if pauses else _IN_WORDS[mode]
            tell(f"strategy='spmd' runs this training {how}{semantics}: {reasons[0]}")
            self._told = mode
        self._chosen, self._step_hooks, self._pauses = mode, step_hooks, pauses
        return mode, step_hooks, pauses

    def came_late(self, context: Context) -> str | None:
        """A hook that was added later and needs a worse mode than the chosen one, because a graph would skip it."""
        mode, findings = classify(context)
        worse = list(Mode).index(mode) > list(Mode).index(self._chosen)
        others = [f for f in findings if f.feature.detect is not gradient_hooks]
        if self._pauses and others and not worse:
            findings, worse = others, True
        steps = [f for f in findings if f.feature.name == "optimizer step hooks" and not self._step_hooks]
        if not worse and not steps:
            return None
        found = findings[0] if worse else steps[0]
        return f"{found.found}; it came in mid-run, and a graph would skip it: register hooks before fit"
