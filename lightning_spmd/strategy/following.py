"""Steps that are followed: the user's Python runs, once, and what it computes is left to a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_spmd import _private_api as private
from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.ir.steps import RecordedCall
from lightning_spmd.messages import tell
from lightning_spmd.stages.capture.batch import Batch
from lightning_spmd.stages.capture.follow.follower import Follower, Step, Unfollowed
from lightning_spmd.stages.capture.follow.notes import Made
from lightning_spmd.stages.capture.follow.program import Live, Program, Want
from lightning_spmd.stages.capture.follow.queue import Queue, Shadows, known
from lightning_spmd.stages.capture.packing import parameter_names
from lightning_spmd.strategy.replay import Recorded, replay
from lightning_spmd.strategy.run_context import RunContext

MOST_EAGER = 8
"""After so many steps that went on eagerly the others are not followed either."""


class RanEagerly(Exception):
    """A step ran as eager training's; its backward pass and the rest are Lightning's to do.

    Args:
        returned: by ``training_step``.
        reason: why, with ``file:line``.
    """

    def __init__(self, returned: Any, reason: str) -> None:
        super().__init__(reason)
        self.returned = returned


class FollowedStep:
    """One step whose Python has run.

    Args:
        step: the step.
        returned: by the step method.
        calls: of ``self.log`` and metrics, queued.
        wants: the results that they, or anybody else, have.
        program: the step's way; None of a step that ran for good.
    """

    def __init__(
        self, step: Step, returned: Any, calls: Sequence[RecordedCall], wants: Sequence[Want], program: Program | None
    ) -> None:
        self.returned, self.calls, self.program = returned, calls, program
        self._step, self._wants = step, wants

    @property
    def reason(self) -> str | None:
        """Why the step ran for good; None if it did not."""
        if self._step.reason is None:
            return None
        text, place = self._step.reason
        return f"{text} ({place})" if place else text

    def fill(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Give what somebody has its value; gives the values for the queue.

        Args:
            values: of the program's wants.
        """
        if self.program is None:
            raise ValueError("a step that ran for good has nothing to fill")
        by_want = dict(zip(self.program.wants, values, strict=True))
        for want in self._wants:
            if want.after is None and type(want.source) is Made:
                self._step.fill(want.source, by_want[want])
        return [by_want[want] for want in self._wants]

    def for_good(self, reason: str) -> None:
        """Compute what was noted as eager training would have: there is no graph of it."""
        self._step.eagerly(reason)


class Following:
    """The steps of one method of a module.

    Args:
        context: of the run.
        flush: does what the last iteration left for the next one.

    Attributes:
        ended: why steps are no longer followed; None while they are.
    """

    def __init__(self, context: RunContext, flush: Callable[[], None]) -> None:
        self.ended: str | None = None
        self._context, self._flush = context, flush
        self._follower = Follower(self._names, self._is_named)
        self._live = Live()
        self._wants: dict[tuple[int, frozenset[Any]], dict[Want, None]] = {}
        self._shadows: tuple[list[Any], Shadows] | None = None
        self._eager = self._graphs = 0

    # ------------------------------------------------------------------ names of the module's tensors
    def _names(self) -> dict[int, str]:
        module = self._context.module
        names = {id(t): name for name, t in module.named_buffers()}
        return {**names, **parameter_names(module, self._context.optimizer)}

    def _is_named(self, name: str, tensor: Tensor) -> bool:
        part: Any = self._context.module
        *path, last = name.split(".")
        for key in path:
            part = part._modules.get(key) if isinstance(part, nn.Module) else None  # noqa: SLF001 - its public form walks
            if part is None:
                return self._names().get(id(tensor)) == name
        own = part._parameters.get(last)  # noqa: SLF001 - as above
        return (part._buffers.get(last) if own is None else own) is tensor  # noqa: SLF001 - as above

    # ------------------------------------------------------------------ a step
    def step(self, batch: Batch, arguments: Mapping[str, Any], method: str) -> FollowedStep:
        """Run the user's Python.

        Args:
            batch: of the step.
            arguments: the method's other arguments.
            method: its name.
        """
        context = self._context
        step = Step(self._follower, batch.tensor_values)
        step.on_values = self._flush
        wants: dict[Want, int] = {}

        def want(tensor: Tensor, role: OutputRole) -> int | None:
            source = step.source_if_known(tensor)
            return None if source is None else wants.setdefault(Want(source, role, len(step.notes)), len(wants))

        queue = Queue(self._shadows_now(), want, step.eagerly)
        step.on_eager = lambda now: self._work_off(queue, [now(w.source).detach() for w in wants], batch)
        with self._module_paths(step), context.step_context(method), queue.active(), step.active():
            try:
                returned = known_in(getattr(context.module, method)(batch.tree, *arguments.values()))
            except Unfollowed as reason:
                raise RuntimeError(str(reason)) from reason
        step.end()
        if step.is_eager:
            self._count_eager()
            return FollowedStep(step, returned, (), (), None)
        self._graphs += 1
        loss = returned.get("loss") if isinstance(returned, dict) else returned
        source = step.source_if_known(loss) if isinstance(loss, Tensor) else None
        del loss
        for made in step.kept():
            wants.setdefault(Want(made, OutputRole.LOGGED), len(wants))
        free = frozenset(step.numbers)
        all_wants = self._wants.setdefault((step.way, free), {})
        all_wants.update(dict.fromkeys(wants))
        self._live.outside, self._live.numbers = step.outside, step.numbers
        program = Program(step.notes, step.way, tuple(all_wants), source, self._live)
        return FollowedStep(step, returned, queue.calls, list(wants), program)

    def _shadows_now(self) -> Shadows:
        module = self._context.module
        tables = private.child_tables(module) if self._shadows is None else None
        if self._shadows is None or any(len(t) != n for t, n in self._shadows[0]):
            tables = tables or private.child_tables(module)
            self._shadows = [(t, len(t)) for t in tables], Shadows(module)
        return self._shadows[1]

    @contextlib.contextmanager
    def _module_paths(self, step: Step) -> Any:
        """Notes know the module whose ``forward`` called, of steps that begin without a known way."""
        if self._follower.root.children:
            yield
            return
        with module_paths(self._context.module) as path:
            step.module_path = path
            yield

    def _work_off(self, queue: Queue, values: Sequence[Tensor], batch: Batch) -> None:
        """The step goes on eagerly: what was queued is done, and from here on nothing is."""
        queue.take_away()
        calls, queue.calls = queue.calls, []
        done = replay(self._context.module, Recorded(calls, {}), values, batch.values, 0, is_global=False)
        for result in queue.results:
            result.becomes(done)

    def _count_eager(self) -> None:
        self._eager += 1
        if not self._graphs or self._eager >= MOST_EAGER:
            self.ended = "steps ran eagerly"

    def graph_failed(self, reason: str) -> None:
        """There is no graph of a step that was followed."""
        self._graphs -= 1
        self._count_eager()
        tell(f"strategy='spmd' ran a step eagerly: {reason}")


def known_in(returned: Any) -> Any:
    """What a step returned, with metrics' values as the tensors that they are."""
    if isinstance(returned, dict):
        return {key: known(value) for key, value in returned.items()}
    return known(returned)


@contextlib.contextmanager
def module_paths(root: nn.Module) -> Any:
    """Gives what says which module's ``forward`` runs, through torch's global module hooks."""
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    paths = {id(module): path for path, module in root.named_modules()}
    stack = [""]

    def enter(module: nn.Module, _: Any) -> None:
        stack.append(paths.get(id(module), stack[-1]))

    def leave(_: nn.Module, __: Any, ___: Any) -> None:
        stack.pop()

    before = register_module_forward_pre_hook(enter)
    after = register_module_forward_hook(leave, always_call=True)
    try:
        yield lambda: stack[-1]
    finally:
        before.remove()
        after.remove()
