"""A final graph with compiled regions, and how they are chosen.

The first runs of a graph decide, on all ranks alike::

    "inductor"   compile · a run in which each region is compared with its operators · the graph with regions
    "auto"       two measured runs · compile what is worth it · the same comparison, timed · those that are faster

Whatever happens to one region costs that region: it stays as its operators. Ranks tell each other what they measured
and saw, the slowest of both sides counts, and one that failed somewhere is used nowhere: what is whole on every rank
stays equal to the last bit.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.profiler import record_function

from lightning_spmd import _private_api as private
from lightning_spmd.cache import the_store
from lightning_spmd.ir.source import function_of
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.messages import tell, warn
from lightning_spmd.stages.runtime.lowering import Lowering, LoweringContext, Together, as_python, is_settled
from lightning_spmd.stages.runtime.regions.choice import fitting_regions, worthwhile
from lightning_spmd.stages.runtime.regions.code import CODES, entry_of
from lightning_spmd.stages.runtime.regions.partition import computing
from lightning_spmd.stages.runtime.regions.region import Region, lowered_graph
from lightning_spmd.stages.runtime.regions.trial import Verdict, tried
from lightning_spmd.stages.runtime.trial_runs.profile import RUNS, Profile, agree

FASTER = 0.95
"""Part of its operators' time that a region may take at most to be chosen by ``"auto"``."""

Run = Callable[..., Sequence[Any]]


class LoweredStep:
    """Runs a final graph; after its first runs with regions.

    Args:
        step: the graph; it is changed by nobody from the first run on.
        mode: ``"auto"`` or ``"inductor"``.
        context: exchanges with the other ranks, and what is known of the run.
        last: what the graph runs as when its regions are chosen.
    """

    def __init__(self, step: ShardedStep, mode: str, context: LoweringContext, last: Lowering = as_python) -> None:
        self.regions: dict[int, Region] = {}
        self.kinds: set[str] = set()
        """Keys of the regions that were chosen wherever they are."""
        self._step = step
        self._mode = mode
        self._context = context
        self._last = last
        self._profile: Profile | None = None
        self._run: Run = self._first_run

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """The outputs of the graph."""
        return self._run(*inputs)

    @property
    def is_settled(self) -> bool:
        """Whether its regions are chosen."""
        return is_settled(self._run)

    # ------------------------------------------------------------------ the first runs
    def _first_run(self, *inputs: Any) -> Sequence[Any]:
        """Find regions, and measure the graph where that decides something."""
        if self._profile is None:
            self.regions = self._found()
            self._profile = Profile(self._step.graph_module)
        if not self.regions:
            return self._settle(self._as_operators())(*inputs)
        if self._mode == "inductor":
            return self._trial(*inputs)
        outputs: Sequence[Any] = self._profile.run(*inputs)
        if self._profile.runs == RUNS:
            self._choose_by_times(self._profile.seconds)
        return outputs

    def _choose_by_times(self, seconds: Mapping[str, float]) -> None:
        everyone = self._context.gather((dict(seconds), self._context.steps_left()))
        times = agree(self._step.graph_module.graph, [times for times, _ in everyone])
        chosen = worthwhile(self.regions, times, min(left for _, left in everyone))
        # sizes may differ a little between ranks, so one of them decides
        self.regions = {number: self.regions[number] for number in self._context.gather(chosen)[0]}
        self._settle(self._trial if self.regions else self._as_operators())

    def _settle(self, run: Run) -> Run:
        """What runs from now on."""
        self._run, self._profile = run, None
        return run

    def _trial(self, *inputs: Any) -> Sequence[Any]:
        """Compile, and run regions beside their operators."""
        self._compile()
        verdicts = {number: Verdict(CODES.problem(region)) for number, region in self.regions.items()}
        functions: dict[int, Run] = {}
        for number, region in self.regions.items():
            code = CODES.known(region)
            if code is None:
                functions[number] = region.function
            else:
                functions[number] = tried(region, code, functools.partial(verdicts.__setitem__, number))
        outputs = function_of(self._with(functions))(*inputs)
        if any(isinstance(value, Tensor) and value.is_cuda for value in inputs):
            torch.cuda.empty_cache()  # both sides needed some at once
        self._decide(self._context.gather(verdicts))
        return outputs

    def _decide(self, everyone: Sequence[Mapping[int, Verdict]]) -> None:
        """Choose regions by what all ranks saw of them."""
        chosen: dict[int, Region] = {}
        problems: dict[str, list[Region]] = {}
        for number, region in self.regions.items():
            seen = [verdicts[number] for verdicts in everyone]
            problem = next((v.problem for v in seen if v.problem), "")
            if problem:
                problems.setdefault(problem, []).append(region)
            elif self._mode == "inductor" or max(v.lowered for v in seen) <= FASTER * max(v.eager for v in seen):
                chosen[number] = region
        for problem, (region, *others) in problems.items():
            more = f" and {len(others)} other regions" if others else ""
            warn(f"strategy='spmd' leaves {region.tag}{more} as operators: {problem}")
        left = {region.key for number, region in self.regions.items() if number not in chosen}
        self.kinds = {region.key for region in chosen.values()} - left
        self.regions = chosen
        self._settle(self._as_operators())
        if chosen:
            step = with_code(self._step, chosen)
            self._context.on_result("lowered", step)
            self._settle(self._last(step))
            nodes = sum(computing(region.nodes) for region in chosen.values())
            kinds = len({region.key for region in chosen.values()})
            tell(
                f"strategy='spmd' runs {len(chosen)} compiled regions, {kinds} of them different, for {nodes} operators"
            )

    # ------------------------------------------------------------------ pieces
    def _found(self) -> dict[int, Region]:
        """The graph's regions, if all ranks find the same ones."""
        if any(not axis.is_even for axis in self._step.axes):
            # ranks with other sizes may round otherwise what must be equal on all of them
            tell("strategy='spmd' compiles nothing of graphs in which ranks have unequal rows")
            return {}
        found = fitting_regions(self._step)
        shape = [(region.nodes[0].name, region.place.name) for region in found.values()]
        everyone = self._context.gather(shape)
        if all(other == shape for other in everyone):
            return found
        tell("strategy='spmd' compiles nothing of a graph whose sizes let each rank find other regions")
        return {}

    def _compile(self) -> None:
        """Have code for the regions: of ranks that share a disk each compiles its part, the others read it."""
        folder = the_store().folder
        where = (socket.gethostname(), str(folder) if folder is not None else str(os.getpid()))
        by_key = {entry_of(region): region for region in self.regions.values()}
        everyone: list[tuple[Any, list[str]]] = self._context.gather((where, list(by_key)))
        for place, key in enumerate(by_key):
            sharing = [rank for rank, (other, keys) in enumerate(everyone) if other == where and key in keys]
            if sharing[place % len(sharing)] == self._context.rank:
                self._context.on_region(place, len(by_key))
                CODES.make(by_key[key])
        self._context.gather(None)  # by now everything is on disk
        for region in by_key.values():
            CODES.make(region)
        self._context.on_region(len(by_key), len(by_key))

    def _with(self, functions: Mapping[int, Run]) -> fx.GraphModule:
        graph = lowered_graph(self._step.graph_module.graph, self.regions, functions)
        return private.GraphModule(self._step.graph_module, graph)

    def _as_operators(self) -> Run:
        return self._last(self._step)


def with_code(step: ShardedStep, regions: Mapping[int, Region]) -> ShardedStep:
    """The step with the code of regions in their place."""
    functions = {number: LoweredRegion(region) for number, region in regions.items()}
    graph = lowered_graph(step.graph_module.graph, regions, functions)
    return ShardedStep(private.GraphModule(step.graph_module, graph), step.signature, step.axes)


class RegionLowering(Together):
    """Regions of an iteration's graphs.

    Args:
        mode: ``"auto"`` or ``"inductor"``.
        context: exchanges with the other ranks, and what is known of the run.
        last: what graphs run as when regions are chosen.
    """

    def __init__(self, mode: str, context: LoweringContext, last: Lowering = as_python) -> None:
        self._mode = mode
        self._context = context
        self._last = last
        self._deciding: LoweredStep | None = None

    def __call__(self, step: ShardedStep) -> LoweredStep:
        """A callable that chooses regions in its first runs."""
        self._deciding = LoweredStep(step, self._mode, self._context, self._last)
        return self._deciding

    def following(self, step: ShardedStep) -> Run:
        """A callable with the kinds of regions that were chosen in the other graph."""
        kinds = set[str]() if self._deciding is None else self._deciding.kinds
        found = fitting_regions(step) if kinds else {}
        regions = {n: r for n, r in found.items() if r.key in kinds and CODES.known(r) is not None}
        return self._last(with_code(step, regions) if regions else step)


class LoweredRegion:
    """A region's code, under a name; its operators where inputs lie otherwise than it was made for.

    Args:
        region: it has code.
    """

    launches_only = True  # nothing that a CUDA graph could not hold

    def __init__(self, region: Region) -> None:
        self.__name__ = self.__qualname__ = region.name
        self.__module__ = __name__
        self._region = region
        self._tag = region.tag
        self._code = CODES.known(region) or (lambda inputs: region.function(*inputs))
        self._told = False

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """The region's outputs."""
        try:
            if private.profiler_is_on():
                with record_function(self._tag):
                    return self._code(list(inputs))
            return self._code(list(inputs))
        except AssertionError as error:  # the code looks at sizes and strides before it does anything
            if not self._told:
                self._told = True
                warn(f"strategy='spmd' runs {self._tag} as operators: {str(error).splitlines()[0]}", everywhere=True)
            return self._region.function(*inputs)
