"""Notices to users while a run's graphs are built, each given once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from lightning_spmd.ir.node_info import info_of, named, spec_of
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import CapturedStep, IterationGraphs
from lightning_spmd.messages import tell, warn
from lightning_spmd.stages import announce
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.stages.capture.batch.rows_of_rank import about_tensors, lists_of_tensors
from lightning_spmd.strategy.graphs.graph_table import creates_state


class BuildNotices:
    """Notices of one run, each given once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def is_new(self, gist: str) -> bool:
        """Whether a notice of this gist is the first; it is remembered."""
        if gist in self._told:
            return False
        self._told.add(gist)
        return True

    def once(self, text: str) -> None:
        """Give a notice once."""
        if self.is_new(text):
            tell(text)

    def of_overlap(self, captured: CapturedStep, graphs: IterationGraphs) -> None:
        """How iterations overlap; not for the graph of the first step."""
        gist = graphs.notes.partition(" (")[0].partition(":")[0]  # without the times, which differ a graph
        if graphs.notes and not creates_state(captured) and captured.variant.apply and self.is_new(gist):
            tell(f"strategy='spmd' overlaps iterations: {graphs.notes}")

    def of_passes(self, captured: CapturedStep, graphs: IterationGraphs) -> None:
        """The passes' notes; not for the graph of the first step."""
        for remark in graphs.remarks:
            if not creates_state(captured) and self.is_new(remark.partition(":")[0]):
                tell(f"strategy='spmd', {remark}")

    def of_repairs(self, nodes: Sequence[fx.Node]) -> None:
        """Copies that come in because a shape function of torch's is wrong, once an operator and place."""
        for node in nodes:
            if self.is_new(f"{node.target} {info_of(node).module}"):
                tell(
                    f"strategy='spmd' copies {spec_of(node).bytes} bytes a step: {named(node)} lays its result out in "
                    "memory otherwise than torch's shape function says"
                )

    def of_fallback(self, line: str) -> None:
        """An operator that runs on gathered tensors; once an operator and place, not for each shape again."""
        if self.is_new(line.partition(" bytes")[0].rpartition(",")[0]):
            announce(line)

    def of_lists(self, batch: Batch, captured: CapturedStep) -> None:
        """Lists of tensors that may be one for each row, if the step looks at them."""
        placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
        entries = zip(placeholders, captured.signature.inputs, strict=True)
        read = [e.name for node, e in entries if e.role is InputRole.BATCH and node.users]
        for path in lists_of_tensors(batch.tree, batch.rows()):
            if any(name.startswith(f"batch{path}[") for name in read) and self.is_new(path):
                warn(about_tensors(path, batch.rows()))
