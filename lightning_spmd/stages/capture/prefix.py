"""The part of a step before a value that Python wants to know, as a graph of its own."""

from __future__ import annotations

from torch import fx, nn

from lightning_spmd import _private_api as private
from lightning_spmd.ir.guards import Guards
from lightning_spmd.ir.reads import checks_of
from lightning_spmd.ir.signature import GraphOutput, OutputRole, Signature
from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.stages.capture.inputs import InputTable
from lightning_spmd.stages.capture.packing import remove_dead_nodes, with_mutations
from lightning_spmd.stages.capture.python_state import PythonState
from lightning_spmd.stages.capture.reads import ReadWanted, writes_apart
from lightning_spmd.stages.capture.recorder import Recorder
from lightning_spmd.stages.capture.request import CaptureRequest


def pack_prefix(
    wanted: ReadWanted, request: CaptureRequest, recorder: Recorder, inputs: InputTable, python: PythonState
) -> None:
    """Make what was recorded until a value was wanted a graph that gives it, and changes nothing.

    Args:
        wanted: receives the graph.
        request: what was being captured.
        recorder: which recorded it; it is used up.
        inputs: of its graph.
        python: knows where tensors from outside are found.
    """
    graph: fx.Graph = recorder.graph
    for check in checks_of(graph):
        graph.erase_node(check)
    nodes = [recorder.reads.nodes[number] for number in wanted.numbers]
    graph.output(tuple(nodes)).meta["val"] = None
    writes_apart(graph, prefix=True)
    remove_dead_nodes(graph)
    inputs.drop_unused(keep=())
    graph.lint()
    entries = [
        GraphOutput(OutputRole.LOGGED, (), f"read {number}", node.meta["val"])
        for number, node in zip(wanted.numbers, nodes, strict=True)
    ]
    wanted.prefix = CapturedStep(
        private.GraphModule(nn.Module(), graph),
        Signature(with_mutations(graph, inputs.in_order()), tuple(entries)),
        Guards(),
        [python.reader_of(t) for t in recorder.constants],
        variant=request.variant,
        host_values=python.host_values(request.moving),
    )
