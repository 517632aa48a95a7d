"""The complete result of a plan, from which output is printed, drawn and written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_spmd.cost.hardware import Machines
from lightning_spmd.cost.operators import work_of
from lightning_spmd.ir.node_info import TensorSpec, info_of
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.planning.capturing import Capture
from lightning_spmd.planning.contents import Contents, contents_of
from lightning_spmd.planning.kernels import Kernels
from lightning_spmd.planning.layout import BuiltPart, GroupPlace, Layout, build_layout
from lightning_spmd.planning.streams import COMPUTE, Played, Player
from lightning_spmd.planning.times import Clock, message_of


@dataclass(frozen=True)
class Phase:
    """A graph that a rank runs.

    Args:
        name: name of the part and the phase.
        times: how often it runs in one steady iteration; 0 for setup and cleanup.
        step: the graph.
        played: the simulated run.
        contents: the contents of memory.
    """

    name: str
    times: int
    step: ShardedStep
    played: Played
    contents: Contents


@dataclass(frozen=True)
class Collective:
    """A collective of an iteration.

    Args:
        kind: which one.
        size: bytes, as in ``cost.collectives``.
        group: name of its process group.
        ranks: of the group.
        link: that it waits for.
        seconds: how long it takes.
        exposed: of that, how long the device waits for it.
        module: path of the module whose tensors it moves, if they are one module's.
        phase: in which it runs.
    """

    kind: str
    size: int
    group: str
    ranks: int
    link: str
    seconds: float
    exposed: float
    module: str
    phase: str


@dataclass(frozen=True)
class Layer:
    """A parameter's placement.

    Args:
        name: of the parameter.
        shape: global shape.
        local: shape on rank 0.
        placements: by axis.
        bytes: on rank 0.
    """

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    placements: Mapping[str, str]
    bytes: int


@dataclass(frozen=True)
class Outlook:
    """The prediction for one rank.

    Args:
        machines: the devices and links.
        layout: the layout.
        axes: ranks by axis.
        rows: rows of a rank's batch.
        global_rows: rows of the global batch.
        precision: of the Trainer.
        parameters: number of parameters.
        phases: the graphs, in order.
        groups: the ranks of each group.
        flops: floating-point operations of the products in an iteration, on all ranks together, without recomputation.
        peak_flops: operations per second of all devices, by the maker.
        remarks: messages of the stages.
        layers: the placement of each parameter.
    """

    machines: Machines
    layout: Layout
    axes: Mapping[str, int]
    rows: int
    global_rows: int
    precision: str
    parameters: int
    phases: Sequence[Phase]
    groups: Mapping[str, GroupPlace]
    flops: float
    peak_flops: float
    remarks: Sequence[str]
    layers: Sequence[Layer]

    # ------------------------------------------------------------------ time
    @property
    def step_seconds(self) -> float:
        """Of an iteration in the steady state."""
        return sum(p.times * p.played.seconds for p in self.phases)

    @property
    def computing(self) -> float:
        """Of these, seconds in which the device computes."""
        return sum(p.times * p.played.computing for p in self.phases)

    @property
    def communicating(self) -> float:
        """Seconds of all collectives of an iteration, one after the other."""
        return sum(p.times * p.played.communicating for p in self.phases)

    @property
    def exposed(self) -> float:
        """Seconds in which the device waits for collectives."""
        return sum(p.times * p.played.exposed for p in self.phases)

    @property
    def idle(self) -> float:
        """Seconds in which the device waits for the host."""
        return max(0.0, self.step_seconds - self.computing - self.exposed)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: of the devices' peak, the share that the model's products take."""
        return self.flops / (self.step_seconds * self.peak_flops) if self.step_seconds else 0.0

    @property
    def rows_per_second(self) -> float:
        """Samples a second, on all ranks together."""
        return self.micro_batches * self.global_rows / self.step_seconds if self.step_seconds else 0.0

    @property
    def micro_batches(self) -> int:
        """Batches of an iteration."""
        return sum(p.times for p in self.phases if _has_forward(p))

    # ------------------------------------------------------------------ memory
    @property
    def highest(self) -> Phase:
        """The phase in which the most is in memory."""
        return max(self.phases, key=lambda p: p.contents.peak)

    @property
    def peak_bytes(self) -> int:
        """Bytes of tensors at the highest point of a step."""
        return self.highest.contents.peak

    @property
    def needed_bytes(self) -> float:
        """The bytes that are needed, with the device's own reserve."""
        return self.peak_bytes + self.machines.device.reserved

    @property
    def fits(self) -> bool:
        """Whether the devices have so much memory."""
        return self.needed_bytes <= self.machines.device.memory

    def always(self, kind: str) -> int:
        """Bytes of a kind that are always there."""
        return max((p.contents.always.get(kind, 0) for p in self.phases), default=0)

    def largest(self, kind: str) -> int:
        """The most bytes of a kind at any time."""
        return max((here.get(kind, 0) for p in self.phases for here in p.contents.curve), default=0)

    # ------------------------------------------------------------------ communication
    def collectives(self) -> Iterator[Collective]:
        """The collectives of a steady iteration, in order."""
        for phase in self.phases:
            for span in phase.played.spans if phase.times else ():
                if span.stream != COMPUTE:
                    message, place = message_of(span.node), self.groups[span.stream]
                    link = self.machines.link(place.size, place.stride).name
                    info = info_of(span.node)
                    yield Collective(
                        message.kind, message.size, span.stream, place.size, link, span.seconds,
                        phase.played.waited(span.node),
                        info.module, phase.name,
                    )  # fmt: skip

    def bytes_sent(self) -> dict[str, int]:
        """Bytes of collectives by group."""
        found = Counter[str]()
        for collective in self.collectives():
            found[collective.group] += collective.size
        return dict(found)


def outlook_of(
    capture: Capture,
    layout: Layout,
    machines: Machines,
    on_stage: Callable[[str], None] = lambda _stage: None,
    kernels: Kernels | None = None,
) -> Outlook:
    """Predict a training.

    Args:
        capture: its iteration.
        layout: the layout.
        machines: the devices and links there.
        on_stage: called at each stage and pass; an exception that it raises ends the work.
        kernels: operators that were measured.

    Raises:
        ConfigurationError: the layout does not fit.
        ExpansionError: an operator cannot be expressed.
    """
    groups = layout.groups()
    clock = Clock(machines, groups, kernels or {})
    built = build_layout(capture, layout, clock.seconds, "cpu" if machines.device.kind == "cpu" else "cuda", on_stage)
    first = capture.parts[0].captured
    parameters = [e for _, e in first.signature.inputs_of(InputRole.PARAMETER)]
    axes = layout.sizes
    flops, seconds_at_peak = _ideal(capture, machines)
    return Outlook(
        machines=machines,
        layout=layout,
        axes=axes,
        rows=capture.global_rows // layout.batches,
        global_rows=capture.global_rows,
        precision=capture.precision,
        parameters=sum(e.value.numel for e in parameters),
        phases=_phases(built, machines, groups),
        groups=groups,
        flops=flops,
        peak_flops=layout.ranks * flops / seconds_at_peak if seconds_at_peak else 0.0,
        remarks=[*_remarks(built), *capture.remarks],
        layers=list(_layers(capture, built[0])),
    )


def _phases(built: Sequence[BuiltPart], machines: Machines, groups: Mapping[str, GroupPlace]) -> list[Phase]:
    """Two iterations are played, of which the second is the steady one, and the last one is finished."""
    device = machines.device
    on_host = device.kind == "cpu"
    core = {name: machines.link(place.size, place.stride).core for name, place in groups.items()} if on_host else {}
    player = Player(device.launch, on_host=on_host, core=core)
    several = len(built) > 1
    contents = {(b.part.variant, name): contents_of(step) for b in built for name, step in b.phases().items()}
    found: list[Phase] = []

    def play(part: BuiltPart, name: str, times: int) -> Phase:
        step = part.phases()[name]
        label = f"{part.part.variant}: {name}" if several else name
        played = player.play(label, step, part.seconds[name])
        return Phase(label, times, step, played, contents[part.part.variant, name])

    for part in built:
        play_first = "setup" if part.graphs.setup is not None else "main"
        phase = play(part, play_first, 0)
        found += [phase] if play_first == "setup" else []
    for steady in (False, True):
        phases = [play(part, "main", part.part.times) for part in built]
        found += phases if steady else []
    found += [play(part, "cleanup", 0) for part in built if part.graphs.cleanup is not None]
    return found


def _remarks(built: Sequence[BuiltPart]) -> list[str]:
    told = [remark for b in built for remark in (*b.graphs.remarks, *b.gathered, b.graphs.notes) if remark]
    return [remark.replace("by the measured times", "by these times") for remark in dict.fromkeys(told)]


def _ideal(capture: Capture, machines: Machines) -> tuple[float, float]:
    """FLOPs of an iteration's products on one device, and seconds of them at the maker's peak."""
    flops = seconds = 0.0
    for part in capture.parts:
        for node in part.captured.graph_module.graph.nodes:
            work = work_of(node)
            flops += part.times * work.flops
            seconds += part.times * work.flops / machines.device.peak(work.dtype)
    return flops, seconds


def _layers(capture: Capture, built: BuiltPart) -> Iterator[Layer]:
    step = built.graphs.setup or built.graphs.main
    whole = {e.key: e.value for _, e in capture.parts[0].captured.signature.inputs_of(InputRole.PARAMETER)}
    for _, entry in step.signature.inputs_of(InputRole.PARAMETER):
        spec: TensorSpec = entry.value
        names = [axis.name for axis in step.axes]
        places = {name: str(p) for name, p in zip(names, entry.placements, strict=False)}
        full = whole.get(entry.key, spec)
        yield Layer(entry.name, tuple(full.shape), tuple(spec.shape), places, spec.bytes)


def _has_forward(phase: Phase) -> bool:
    return any(True for _ in phase.step.signature.inputs_of(InputRole.BATCH, InputRole.SHARED_BATCH))
