"""Who tells whom while a step is traced: the parts of a capture are made apart, and meet here."""

from __future__ import annotations

from lightning_spmd.stages.capture.inputs import InputTable
from lightning_spmd.stages.capture.log_recorder import LogRecorder
from lightning_spmd.stages.capture.python_state import PythonState
from lightning_spmd.stages.capture.recorder import Recorder


def connect(recorder: Recorder, inputs: InputTable, python: PythonState, logs: LogRecorder) -> None:
    """Let the parts of one capture know of each other.

    Args:
        recorder: of the graph.
        inputs: of the graph.
        python: what the step sees of Python.
        logs: what it logs.
    """
    recorder.watch = python.watch

    def settle() -> None:
        recorder.settles = True

    python.watch.on_identity = settle
    recorder.reads.role_of = inputs.role_of
    recorder.functions.on_values = python.content_of
    recorder.functions.array_of = logs.array_of
    logs.on_metric = python.see_metric
    python.on_rank = logs.loggers.rank_is_asked
    python.on_loggers = logs.loggers.meet
    logs.loggers.loggers = python.loggers
    logs.loggers.ask_for_loggers = python.see_loggers
    logs.loggers.entry_of = lambda value: python.sightings.places.get(id(value))
    logs.loggers.see = python.see_attribute
    logs.loggers.leave_alone = python.sightings.leave_alone
    logs.loggers.unwatched = python.watch.paused
