"""Faults that the tests must notice, planted one at a time: ``python -m tests.mutants``.

Each is a small change of the source that makes training wrong, or takes away what would tell. Every fault is written
into a copy of the package in a temporary folder, where the default tests run until one fails: those first that are
likely to notice, then the rest. What noticed goes to standard output.

    python -m tests.mutants                       # all of them
    python -m tests.mutants bucket vote           # those whose names contain one of these words
    python -m tests.mutants --likely              # only the tests that are likely to notice: minutes instead of hours
    python -m tests.mutants --write               # the list into docs/contributing.md

``tests/test_mutants.py`` checks that every fault still fits the source.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "lightning_spmd"
DOCUMENT = ROOT / "docs" / "contributing.md"
BEGIN, END = "<!-- mutants -->", "<!-- end of mutants -->"

CAPTURE, EXPAND, PASSES, PHASES = "capture", "expand", "passes", "phases"
RUNTIME, AGREEMENT, STATE, STRATEGY, CHECKPOINTS = "runtime", "agreement", "state", "strategy", "checkpoints"
ONE_DEVICE = "tests/equality/test_one_device.py"
OPERATORS = "tests/stages/expand/test_operators.py"
PLANS = "tests/equality/test_plans.py"


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Args:
        name: what it does.
        stage: where it is.
        file: below the package.
        old: text that occurs once in the file.
        new: what takes its place.
        likely: tests that are likely to notice: files, test ids or beginnings of them.
    """

    name: str
    stage: str
    file: str
    old: str
    new: str
    likely: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The file with the fault in it.

        Raises:
            ValueError: the text to be replaced is not there, or more than once.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has {text.count(self.old)} times {self.old!r}")
        return text.replace(self.old, self.new)


MUTANTS: tuple[Mutant, ...] = (
    # ------------------------------------------------------------------ capture
    Mutant(
        "accumulated gradients are forgotten when they are applied",
        CAPTURE,
        "stages/capture/trace.py",
        "return held.clone() if gradient is None else held + gradient",
        "return held.clone() if gradient is None else gradient.clone()",
        (f"{ONE_DEVICE}::test_world_size_one_is_bitwise_the_eager_trainer",),
    ),
    Mutant(
        "the loss is not divided by the number of accumulated batches",
        CAPTURE,
        "stages/capture/trace.py",
        "return loss if request.loss_divisor == 1 else loss / request.loss_divisor",
        "return loss",
        (f"{ONE_DEVICE}::test_world_size_one_is_bitwise_the_eager_trainer",),
    ),
    Mutant(
        "gradients are clipped only where they were accumulated",
        CAPTURE,
        "stages/capture/trace.py",
        "if request.clip is not None:",
        "if request.clip is not None and variant.accumulated:",
        (f"{ONE_DEVICE}::test_world_size_one_is_bitwise_the_eager_trainer",),
    ),
    Mutant(
        "the guard on decisions is dropped",
        CAPTURE,
        "stages/capture/trace.py",
        "predicate = program.guard([node for node, _ in inputs]) if program else None",
        "predicate = None",
        ("tests/strategy/test_guards.py", f"{ONE_DEVICE}::test_every_optimizer_is_bitwise"),
    ),
    Mutant(
        "the guards on the batch's plain values are dropped",
        CAPTURE,
        "stages/capture/trace.py",
        "leaves = [BatchGuard(path, value) for path, value in read]",
        "leaves = [BatchGuard(path, value) for path, value in read if not path]",
        ("tests/strategy/test_batches.py", "tests/strategy/test_guards.py"),
    ),
    Mutant(
        "the step's number arguments are frozen",
        CAPTURE,
        "stages/capture/trace.py",
        "arguments = {k: self._host_value(k, v) if type(v) is int else v for k, v in request.arguments.items()}",
        "arguments = dict(request.arguments)",
        (
            "tests/strategy/test_python_in_training_step.py",
            "tests/strategy/test_guards.py",
            "tests/strategy/test_features.py",
        ),
    ),
    Mutant(
        "a first step that is not like the others is taken for one of them",
        CAPTURE,
        "stages/capture/newborn_state.py",
        "return first_difference(first, steady, births) is None",
        "return True",
        ("tests/strategy/test_first_step.py",),
    ),
    Mutant(
        "a predicate guard is content with any answer",
        CAPTURE,
        "ir/guards.py",
        "            if new != old:\n",
        "            if new is None:\n",
        ("tests/strategy/test_guards.py", f"{ONE_DEVICE}::test_every_optimizer_is_bitwise"),
    ),
    # ------------------------------------------------------------------ expansion
    Mutant(
        "a partial sum is taken for the whole",
        EXPAND,
        "stages/expand/redistribute.py",
        "return permuted_back(program, program.all_reduce(permuted(program, node, order), axis, source.op), order)",
        "return node",
        (f"{OPERATORS}", "tests/stages/expand/test_models.py"),
    ),
    Mutant(
        "a whole that becomes a partial sum is put on every rank",
        EXPAND,
        "stages/expand/redistribute.py",
        "return zero_unless(program, node, axis.rank == 0)",
        "return node",
        (f"{OPERATORS}", "tests/stages/expand/test_models.py"),
    ),
    Mutant(
        "a rank's rows begin where those of the rank before it begin",
        EXPAND,
        "ir/placement.py",
        "return ((size * sum(self.split[:at]) // self.total, length),)",
        "return ((size * sum(self.split[: max(at - 1, 0)]) // self.total, length),)",
        (f"{OPERATORS}",),
    ),
    Mutant(
        "chunks overlap by one",
        STATE,
        "ir/placement.py",
        "start = min((self.chunks.rank if rank is None else rank) * longest, size)",
        "start = min((self.chunks.rank if rank is None else rank) * max(longest - 1, 0), size)",
        ("tests/parallel/test_pieces.py", "tests/stages/expand/test_sharded_state.py"),
    ),
    Mutant(
        "rows of uneven ranks weigh alike in a mean",
        EXPAND,
        "stages/expand/rules/reductions.py",
        "    count = math.prod(spec.shape[d] for d in dims)\n    dtype = call.outputs[0].dtype\n",
        "    axes = call.program.axes\n"
        "    count = math.prod(call.program.shape(call['self'])[d] for d in dims) * math.prod(a.size for a in axes)\n"
        "    dtype = call.outputs[0].dtype\n",
        (f"{OPERATORS}", "tests/stages/expand/test_models.py"),
    ),
    Mutant(
        "a variance ignores that it is unbiased",
        EXPAND,
        "stages/expand/rules/reductions.py",
        "max(count - _correction(call), 0.0)",
        "max(count, 0.0)",
        (f"{OPERATORS}::test_ranks_compute_what_one_device_computes[variance",),
    ),
    Mutant(
        "the norm for clipping is that of this rank's part",
        EXPAND,
        "stages/expand/rules/reductions.py",
        "powers = call.all_reduce(call.call(aten.pow.Tensor_Scalar, wide, power), axes)",
        "powers = call.call(aten.pow.Tensor_Scalar, wide, power)",
        ("tests/stages/expand/test_sharded_state.py", f"{OPERATORS}"),
    ),
    Mutant(
        "cross-entropy divides by this rank's weight",
        EXPAND,
        "stages/expand/rules/cross_entropy.py",
        "    total_weight = call.all_reduce(total_weight, rows)\n",
        "",
        (f"{OPERATORS}::test_ranks_compute_what_one_device_computes[cross",),
    ),
    Mutant(
        "split classes are numbered from 0 on every rank",
        EXPAND,
        "stages/expand/rules/cross_entropy.py",
        "own = run(aten.sub.Tensor, target, axis.offset(classes))",
        "own = run(aten.sub.Tensor, target, 0)",
        ("tests/stages/expand/test_tensor_parallel.py",),
    ),
    Mutant(
        "a looked-up word of another rank's piece counts",
        EXPAND,
        "stages/expand/rules/embedding.py",
        "return [call.call(aten.masked_fill.Scalar, rows, call.call(aten.unsqueeze.default, elsewhere, -1), 0)]",
        "return [rows]",
        ("tests/stages/expand/test_tensor_parallel.py",),
    ),
    Mutant(
        "chunks of a sum are not reduced over the rows of a hybrid mesh",
        EXPAND,
        "stages/expand/reduce_scatter.py",
        "        piece = piece if across is None else program.all_reduce(piece, across)\n",
        "        pass\n",
        ("tests/stages/expand/test_sharded_state.py", f"{PLANS}::test_hybrid"),
    ),
    Mutant(
        "a collective reads memory in the wrong order",
        EXPAND,
        "stages/expand/program.py",
        "if self._fakes.is_lazy(operand) or not is_plain(source) or not self._lies_alike(operand):",
        "if self._fakes.is_lazy(operand) or not self._lies_alike(operand):",
        (f"{OPERATORS}", "tests/stages/expand/test_layouts.py", "tests/strategy/test_layouts.py"),
    ),
    Mutant(
        "the order of dimensions is not turned back after a reduction",
        EXPAND,
        "stages/expand/reduce_scatter.py",
        "return permuted(program, node, [order.index(d) for d in range(len(order))])",
        "return permuted(program, node, list(order))",
        ("tests/stages/expand", "tests/strategy/test_layouts.py"),
    ),
    Mutant(
        "blocks of a fused layer are split as if they were one",
        EXPAND,
        "parallel/pieces.py",
        "blocks = tensor.split(list(_blocks(tensor, placement)), placement.dim)",
        "blocks = [tensor]",
        ("tests/parallel", "tests/stages/expand/test_tensor_parallel.py"),
    ),
    # ------------------------------------------------------------------ the verifier
    Mutant(
        "a collective that nobody waits for passes the verifier",
        PASSES,
        "ir/verify.py",
        "        if not waited and not handed_on:\n",
        "        if not users:\n",
        ("tests/ir/test_verify.py",),
    ),
    Mutant(
        "memory in which a collective works may be touched",
        PASSES,
        "ir/verify.py",
        "    _verify_in_flight(graph, regions)\n",
        "",
        ("tests/ir/test_verify.py",),
    ),
    Mutant(
        "a reader may move to the other side of a write",
        PASSES,
        "ir/verify.py",
        "    _verify_writes(counts)\n",
        "",
        ("tests/ir/test_verify.py", "tests/stages/passes"),
    ),
    Mutant(
        "lists of a fused operator may lie in different orders",
        PASSES,
        "ir/verify.py",
        "            _verify_column(node, column, names)\n",
        "            pass\n",
        ("tests/ir", "tests/stages/expand/test_layouts.py::test_the_verifier"),
    ),
    # ------------------------------------------------------------------ passes
    Mutant(
        "values read before and after a write are merged",
        PASSES,
        "stages/passes/common_subexpressions.py",
        'node.meta["write_counts"], section, placements)',
        "section, placements)",
        ("tests/stages/passes/test_common_subexpressions.py",),
    ),
    Mutant(
        "a parameter is gathered again after it was written",
        PASSES,
        "stages/passes/regather_parameters.py",
        "if span is None or memory.next_write(_parameter(chain), position[chain[0]]) < span[1]:",
        "if span is None:",
        ("tests/stages/passes/test_regather_parameters.py",),
    ),
    Mutant(
        "the results of a joined update are handed out in reverse",
        PASSES,
        "stages/passes/optimizer/fuse_optimizer.py",
        "item = self.graph.call_function(operator.getitem, (made, index))",
        "item = self.graph.call_function(operator.getitem, (made, len(group) - 1 - index))",
        ("tests/stages/passes/test_fuse_optimizer.py",),
    ),
    Mutant(
        "equal functions of different numbers are one",
        PASSES,
        "stages/passes/optimizer/fuse_optimizer.py",
        "key = (node.target, *[_constant(a) for a in node.args])",
        "key = (node.target, len(node.args))",
        ("tests/stages/passes/test_fuse_optimizer.py", "tests/stages/passes/test_fuse_optimizer_training.py"),
    ),
    Mutant(
        "members of a bucket get each other's parts",
        PASSES,
        "stages/passes/bucket_writing.py",
        "        parts = split(graph, info, whole, [m.result().numel for m in members])\n",
        "        parts = split(graph, info, whole, [m.result().numel for m in members][::-1])[::-1]\n",
        ("tests/stages/passes/test_bucket_collectives.py",),
    ),
    Mutant(
        "a bucket's wait is left out",
        PASSES,
        "stages/passes/bucket_writing.py",
        "    whole = call(graph, info, spec_of(bucket.started), WAIT, bucket.started)\n",
        "    whole = bucket.started\n",
        ("tests/stages/passes/test_bucket_collectives.py",),
    ),
    Mutant(
        "gradients may be written while they are being reduced",
        PASSES,
        "stages/passes/bucket_collectives.py",
        "expires = memory.next_write(value, index)",
        "expires = end",
        ("tests/stages/passes/test_bucket_collectives.py", "tests/stages/passes"),
    ),
    Mutant(
        "the loss is cast for its reduction as gradients are",
        PASSES,
        "stages/passes/bucket_collectives.py",
        ' != "all_gather" and is_gradient(step, memory, node, wait):',
        ' != "all_gather":',
        ("tests/stages/passes",),
    ),
    Mutant(
        "gathered pieces of several parameters are not taken apart by rank",
        PASSES,
        "stages/passes/bucket_writing.py",
        "        parts = _gathered(graph, memory, bucket, whole)\n",
        "        parts = split(graph, info, whole, [m.result().numel for m in members])\n",
        ("tests/stages/passes",),
    ),
    # ------------------------------------------------------------------ phases
    Mutant(
        "reduce-scatters are waited where their results are needed, at the end",
        PHASES,
        "stages/phases/bounds.py",
        "        for early in due.get(node, ()):\n",
        "        for early in ():\n",
        ("tests/cost",),
    ),
    Mutant(
        "an input that the next iteration may change is handed on without a copy",
        PHASES,
        "stages/phases/split.py",
        '        if self.touches.root(node) not in self.entries or not isinstance(node.meta.get("val"), TensorSpec):\n',
        "        if True:\n",
        ("tests/stages/phases", "tests/strategy/test_overlap.py"),
    ),
    Mutant(
        "late updates come behind those who read the weights",
        PHASES,
        "stages/phases/follow.py",
        "        places[first_conflict(touch, early, body)].extend(nodes)\n",
        "        places[None].extend(nodes)\n",
        ("tests/stages/phases", "tests/strategy/test_overlap.py"),
    ),
    Mutant(
        "what decides about the next graph may come late",
        PHASES,
        "stages/phases/deferral.py",
        "    if touch.writes & guarded:\n",
        "    if False:\n",
        ("tests/stages/phases", "tests/strategy/test_overlap.py"),
    ),
    Mutant(
        "pending updates are forgotten where another graph cannot take them over",
        PHASES,
        "strategy/iteration.py",
        "        if self._pending is not None and not executable.can_follow(self._pending):\n"
        "            self.flush()\n",
        "        if self._pending is not None and not executable.can_follow(self._pending):\n"
        "            self._pending = None\n",
        ("tests/strategy/test_overlap.py",),
    ),
    Mutant(
        "validation sees weights that are an update behind",
        PHASES,
        "strategy/overlap.py",
        '        """Before validation, also in mid-epoch."""\n        self._flush()\n',
        '        """Before validation, also in mid-epoch."""\n',
        ("tests/strategy/test_overlap.py",),
    ),
    Mutant(
        "hooks between batches are not looked for",
        PHASES,
        "strategy/overlap.py",
        'found += [f"{type(callback).__name__}.{hook}" for hook in _CALLBACK_HOOKS if _may_read(callback, hook)]',
        "found += []",
        ("tests/strategy/test_overlap.py",),
    ),
    # ------------------------------------------------------------------ runtime
    Mutant(
        "a parameter is read once and kept",
        RUNTIME,
        "stages/runtime/live_state.py",
        "                    return lambda: tensors[name]\n",
        "                    kept = tensors[name]\n                    return lambda: kept\n",
        ("tests/strategy/test_hooks.py", "tests/strategy/test_features.py"),
    ),
    Mutant(
        "new state is not stored",
        RUNTIME,
        "stages/runtime/executor.py",
        "            write(outputs[position])\n",
        "            pass\n",
        ("tests/strategy/test_first_step.py", f"{ONE_DEVICE}::test_world_size_one"),
    ),
    Mutant(
        "all ranks draw the same dropout mask",
        RUNTIME,
        "stages/runtime/random_streams.py",
        "parts = (self.seed, self.tick, draw, position)",
        "parts = (self.seed, self.tick, draw)",
        ("tests/stages/runtime/test_random_streams.py", f"{ONE_DEVICE}::test_rows_of_different"),
    ),
    Mutant(
        "every step draws the same numbers",
        RUNTIME,
        "stages/runtime/random_streams.py",
        "        self.tick += 1\n",
        "        self.tick = 1\n",
        ("tests/stages/runtime/test_random_streams.py",),
    ),
    # ------------------------------------------------------------------ agreement
    Mutant(
        "ranks run different graphs at a time",
        AGREEMENT,
        "strategy/choice.py",
        "same = not vote.missing and vote.graph[0] == vote.graph[1]",
        "same = not vote.missing",
        ("tests/strategy/test_guards.py", "tests/strategy/test_batches.py", "tests/strategy"),
    ),
    Mutant(
        "the vote on the number of rows is skipped",
        AGREEMENT,
        "strategy/choice.py",
        "    if vote.rows[0] != vote.rows[1]:\n",
        "    if vote.rows[1] < 0:\n",
        ("tests/strategy/test_features.py::test_ranks_with_different", "tests/strategy/test_batches.py"),
    ),
    Mutant(
        "graphs of the ranks are not compared",
        AGREEMENT,
        "stages/runtime/agreement.py",
        "if len(set(control.gather(digest))) == 1:",
        "if control.gather(digest):",
        ("tests/stages/runtime/test_agreement.py", "tests/strategy/test_bad_input.py"),
    ),
    Mutant(
        "groups in which a collective hangs are used again",
        AGREEMENT,
        "parallel/shared_groups.py",
        "            if not _agree([begun for _, begun in sides]):\n",
        "            if None in [begun for _, begun in sides]:\n",
        ("tests/strategy/test_many_fits.py::test_a_collective_left",),
    ),
    # ------------------------------------------------------------------ strategy
    Mutant(
        "gradients of an unfinished accumulation live on",
        STRATEGY,
        "strategy/training.py",
        "trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:\n            iteration.gradients.clear()",
        "trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:\n            pass",
        ("tests/strategy/test_hooks.py", "tests/strategy/test_features.py"),
    ),
    Mutant(
        "the eager path takes over a rank's share of a sum as if it were its mean",
        STRATEGY,
        "strategy/training.py",
        "        scale = torch.distributed.get_world_size() if self._ranks.mesh is not None else 1\n",
        "        scale = 1\n",
        ("tests/strategy/test_messages.py", "tests/strategy"),
    ),
    Mutant(
        "the eager path adds gradients up instead of averaging them",
        STRATEGY,
        "strategy/eager_path.py",
        "        flat /= world_size\n",
        "        flat /= 1 if world_size else 1\n",
        ("tests/strategy/test_features.py", "tests/strategy/test_more_features.py"),
    ),
    Mutant(
        "logged values of uneven batches weigh alike",
        STRATEGY,
        "strategy/replay.py",
        '        said["batch_size"] = rows\n',
        '        said["batch_size"] = 1\n',
        ("tests/strategy/test_batches.py", "tests/strategy/test_features.py"),
    ),
    Mutant(
        "a rank returns predictions for the rows of all",
        STRATEGY,
        "strategy/evaluation.py",
        "own[position] = value.narrow(0, axis.offset(axis.total), axis.split[axis.rank])",
        "own[position] = value",
        ("tests/strategy/test_predictions.py", "tests/strategy/test_evaluation.py"),
    ),
    Mutant(
        "evaluation draws from training's stream",
        STRATEGY,
        "strategy/evaluation.py",
        "            self.context.streams.tick = stable_hash(place)\n",
        "            del place\n",
        ("tests/strategy/test_evaluation.py",),
    ),
    Mutant(
        "metrics are told to sync among ranks that share layers",
        STRATEGY,
        "strategy/ranks.py",
        "                part.process_group = self.mesh.batch_group()\n",
        "                pass\n",
        (
            "tests/strategy/test_shared_batches.py",
            "tests/strategy/test_many_fits.py",
            "tests/strategy/test_evaluation.py",
        ),
    ),
    # ------------------------------------------------------------------ state and checkpoints
    Mutant(
        "placements in different blocks are equal",
        STATE,
        "parallel/state.py",
        "return (self.dim, self.blocks) == (other.dim, other.blocks)",
        "return self.dim == other.dim",
        ("tests/parallel/test_state.py",),
    ),
    Mutant(
        "sharding unties tied weights",
        STATE,
        "parallel/state.py",
        "replaced[id(parameter)] = replaced[id(new)] = new",
        "replaced[id(new)] = new\n                replaced[-1] = new",
        (f"{PLANS}", "tests/strategy/test_sharded_modules.py"),
    ),
    Mutant(
        "tensor-parallel pieces are put together in the wrong order",
        STATE,
        "parallel/state.py",
        "    return joined(parts, placement)\n\n",
        "    return joined(parts[::-1], placement)\n\n",
        ("tests/parallel/test_state.py", "tests/strategy/test_checkpoint_matrix.py::test_a_plain_trainer_resumes"),
    ),
    Mutant(
        "optimizer state is not resumed where it is sharded",
        CHECKPOINTS,
        "strategy/checkpoints.py",
        '    return {**loaded, "state": parts}\n',
        '    return {**loaded, "state": {}}\n',
        ("tests/strategy/test_checkpoint.py", "tests/strategy/test_checkpoint_matrix.py"),
    ),
    Mutant(
        "a checkpoint holds weights without the pending update",
        CHECKPOINTS,
        "strategy/saving.py",
        "    def lightning_module_state_dict(self) -> dict[str, Any]:\n        self.flush()\n",
        "    def lightning_module_state_dict(self) -> dict[str, Any]:\n",
        ("tests/strategy/test_overlap.py", "tests/strategy/test_checkpoint.py"),
    ),
    Mutant(
        "the place in the random streams is not resumed",
        CHECKPOINTS,
        "strategy/random_state.py",
        'streams.seed, streams.tick = state["streams"]["seed"], state["streams"]["tick"]',
        'streams.seed = state["streams"]["seed"]',
        ("tests/strategy/test_checkpoint.py", "tests/strategy/test_checkpoint_matrix.py"),
    ),
    Mutant(
        "random state of a resume in mid-epoch is restored too early",
        CHECKPOINTS,
        "strategy/random_state.py",
        '        if self._resumed["within_epoch"] == within_epoch:\n',
        "        if not within_epoch:\n",
        ("tests/strategy/test_checkpoint.py",),
    ),
)


@dataclass(frozen=True)
class Notice:
    """What became of a fault.

    Args:
        mutant: the fault.
        test: the first test that failed; None if all passed.
        seconds: until then.
    """

    mutant: Mutant
    test: str | None
    seconds: float

    def row(self) -> str:
        """A line of the table."""
        test = "**nobody**" if self.test is None else f"`{self.test.removeprefix('tests/')}`"
        return f"| {self.mutant.stage} | {self.mutant.name} | {test} |"


def plant(mutant: Mutant, folder: Path) -> None:
    """Copy package and tests into a folder, with the fault."""
    for name in (PACKAGE, "tests", "docs", "recipes", ".ci"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    file = folder / PACKAGE / mutant.file
    file.write_text(mutant.applied(file.read_text()))


def first_failure(folder: Path, selection: Sequence[str], *options: str) -> str | None:
    """Run tests until one fails; gives its id."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:warnings", *options]
    done = subprocess.run(
        [*command, *selection], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if found is not None:
        return found[1].partition("[")[0]
    if done.returncode not in (0, 5):
        return f"(pytest ended with {done.returncode})"
    return None


def hunt(mutant: Mutant, *, rest: bool) -> Notice:
    """Plant a fault and look for a test that notices."""
    started = time.monotonic()
    # the list of faults and the rules about the source would notice any fault
    blind = ("--ignore=tests/test_mutants.py", "--ignore=tests/architecture")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plant(mutant, folder)
        test = None
        for likely in mutant.likely:
            path, _, function = likely.partition("::")
            only = ("-k", function.replace("[", " and ")) if function else ()
            test = first_failure(folder, [path], *only, *blind)
            if test is not None:
                break
        if test is None and rest:
            test = first_failure(folder, ["tests"], "-n", "2", "--dist", "loadgroup", *blind)
    return Notice(mutant, test, time.monotonic() - started)


def table() -> str:
    """The list for people: every fault, and the tests that look for it first."""

    def tests(mutant: Mutant) -> str:
        return ", ".join(f"`{likely.removeprefix('tests/')}`" for likely in mutant.likely)

    head = "| stage | fault | looked for first in |\n|---|---|---|\n"
    return head + "".join(f"| {m.stage} | {m.name} | {tests(m)} |\n" for m in MUTANTS)


def main() -> int:
    """Plant the faults and say what noticed them; 1 if one was not noticed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only faults whose names contain one of these")
    parser.add_argument("--likely", action="store_true", help="run only the tests that are likely to notice")
    parser.add_argument("--write", action="store_true", help="write the list into docs/contributing.md, plant nothing")
    arguments = parser.parse_args()
    if arguments.write:
        text = DOCUMENT.read_text()
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        DOCUMENT.write_text(f"{before}{BEGIN}\n{table()}{END}{after}")
        return 0
    chosen = [m for m in MUTANTS if not arguments.words or any(word in m.name for word in arguments.words)]
    notices = []
    for mutant in chosen:
        notices.append(hunt(mutant, rest=not arguments.likely))
        sys.stdout.write(f"{notices[-1].row()} {notices[-1].seconds:.0f} s\n")
        sys.stdout.flush()
    unnoticed = [notice for notice in notices if notice.test is None]
    sys.stdout.write(f"{len(notices) - len(unnoticed)} of {len(notices)} faults were noticed\n")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
