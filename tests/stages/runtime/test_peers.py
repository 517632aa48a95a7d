"""Who is gone, and why, as far as a rank can know it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from lightning_spmd.errors import BatchError, RankDisagreementError, RankLostError
from lightning_spmd.stages.runtime.agreement import lost_ranks
from lightning_spmd.stages.runtime.agreement.lost_ranks import Peers, Process, is_communication_failure
from lightning_spmd.stages.runtime.agreement.whereabouts import Whereabouts

GLOO = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:30641"
)
ELSEWHERE = Process("another machine", 1234)


def _child(code: str) -> Any:
    return subprocess.Popen([sys.executable, "-S", "-c", code])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_ranks, "PATIENCE", 0.3)


def _three(*others: Process, store: Any = None, run: int = 1) -> list[Peers]:
    store, processes = store or dist.HashStore(), [Process.this(), *others]
    return [Peers(store, run, rank, processes) for rank in range(len(processes))]


def test_a_rank_that_raised_is_named_with_its_error() -> None:
    first, second, third = _three(ELSEWHERE, ELSEWHERE)
    assert first.news() is None
    try:
        raise ValueError("a hook of the user\nwith more lines")
    except ValueError as error:
        second.note(error)
    third.note(RankLostError("rank 1 is gone"))  # what follows from it is no news
    text = str(first.explain(GLOO, "training batch 3 of epoch 0"))
    assert text.startswith("rank 1 failed with ValueError: a hook of the user\nwith more lines (at ")
    assert f"{__file__}:" in text
    assert "This rank was at training batch 3 of epoch 0." in text
    assert "Connection closed by peer" not in text  # what is known is enough
    assert "ckpt_path='last') goes on from the last checkpoint, where a ModelCheckpoint has" in text


def test_a_rank_that_stays_somewhere_is_named_with_its_line() -> None:
    first, second, third = _three(ELSEWHERE, ELSEWHERE)
    second.stay_at(Whereabouts("train.py:7"))
    third.stay_at(Whereabouts("train.py:8", "barrier", (0, 1, 2)))
    third.wait_at("a barrier")  # that it says itself
    assert list(first.staying()) == [1]
    text = str(first.explain(RuntimeError("Timed out waiting 20000ms for a message"), "training batch 3 of epoch 0"))
    named = r"rank 1 \(process \d+ on \S+\) has been at train.py:7; rank 2 waits at a barrier. This rank was at"
    assert re.match(named, text)
    assert "it waited 20 s for it, which is the timeout" in text
    third.wait_at("")
    assert str(first.staying()[2]) == "in torch.distributed's barrier, at train.py:8"
    second.stay_at(None)
    assert list(first.staying()) == [2]


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was ended by signal SIGKILL, as the kernel does when memory runs out"),
        ("import os; os.kill(os.getpid(), 11)", "was ended by signal SIGSEGV"),
        ("raise SystemExit(3)", "has ended with code 3"),
    ],
)
def test_a_child_of_this_process_that_ended_is_named_with_how(code: str, how: str) -> None:
    child = _child(code)
    first, _ = _three(Process(Process.this().machine, child.pid))
    while Process(Process.this().machine, child.pid).ended() is None:
        time.sleep(0.01)
    assert first.news() == f"rank 1 is gone: its process {child.pid} {how}"
    child.wait()
    assert first.news() == f"rank 1 is gone: its process {child.pid} has ended"


def test_a_process_that_runs_is_not_suspected() -> None:
    child = _child("import time; time.sleep(60)")
    try:
        first, _ = _three(Process(Process.this().machine, child.pid))
        assert first.news() is None
        text = str(first.explain(GLOO))
        assert text.startswith(f"no sign of life of rank 1 (process {child.pid} on {os.uname().nodename}).")
    finally:
        child.kill()
        child.wait()


def test_of_ranks_elsewhere_the_silent_ones_are_named_and_where_others_wait() -> None:
    first, second, third = _three(ELSEWHERE, ELSEWHERE)
    second.wait_at("training batch 2")
    second.note(GLOO)
    text = str(first.explain(GLOO))
    assert text.startswith("no sign of life of rank 2 (process 1234 on another); rank 1 waits at training batch 2.")
    third.note(GLOO)
    assert str(first.explain(GLOO)).startswith("the connection to another rank broke; rank 1 waits")


def test_a_rank_that_only_followed_is_not_the_cause() -> None:
    child = _child("")
    child.wait()
    first, second, _ = _three(Process(Process.this().machine, child.pid), ELSEWHERE)
    second.note(GLOO)  # it noticed that rank 2 is gone, and ended then
    assert first.news() is None
    assert "no sign of life of rank 2" in str(first.explain(GLOO))


def test_notes_of_another_run_do_not_count() -> None:
    store = dist.HashStore()
    first, second = _three(ELSEWHERE, store=store)
    second.note(ValueError("old"))
    assert first.news() is not None
    first, second = _three(ELSEWHERE, store=store, run=2)
    assert first.news() is None
    second.note(ValueError("new"))
    assert "rank 1 failed with ValueError: new" in str(first.news())


def test_the_first_error_counts() -> None:
    first, second = _three(ELSEWHERE)
    second.note(ValueError("the cause"))
    second.note(TypeError("while cleaning up"))
    assert first.news() == "rank 1 failed with ValueError: the cause"


def test_a_store_that_is_gone_hides_nothing() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise dist.DistNetworkError("failed to recv, got 0 bytes")

    alone = Peers(Gone(), 1, 0, [Process.this(), ELSEWHERE])
    alone.note(ValueError("x"))
    assert "no sign of life of rank 1" in str(alone.explain(GLOO))


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (GLOO, True),
        (RuntimeError("Read error [127.0.0.1]:41687: Connection reset by peer"), True),
        (RuntimeError("Application timeout caused pair closure: Timed out waiting 1800000ms for recv"), True),
        (RuntimeError("NCCL error in: ... remote process exited or there was a network error"), True),
        (dist.DistBackendError("anything"), True),
        (RankLostError("rank 1 is gone"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (BatchError("the connection closed"), False),
        (RankDisagreementError("gloo"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_failures_of_communication_are_told_from_others(error: BaseException, is_one: bool) -> None:
    assert is_communication_failure(error) is is_one


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_what_python_raised_is_the_users_own_whatever_it_says() -> None:
    """A storage that closed its connection is no lost rank: the others are told of it."""
    first, second = _three(ELSEWHERE)
    error = _raised(RuntimeError("the storage closed its socket: connection reset by peer"))
    assert not is_communication_failure(error)
    second.note(error)
    assert str(first.news()).startswith("rank 1 failed with RuntimeError: the storage closed its socket")


def test_what_torch_raises_is_told_by_its_words() -> None:
    """It comes up at a call into C++, in anybody's frame, and is raised again on its way."""

    def reraising() -> None:
        try:
            torch.device("gloo: Connection closed by peer")
        except RuntimeError as error:
            raise error

    with pytest.raises(RuntimeError) as caught:
        reraising()
    assert is_communication_failure(caught.value)


class _Broken(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise RuntimeError("no connection closed so badly")


def test_a_workers_error_is_told_with_what_it_said() -> None:
    first, second = _three(ELSEWHERE)
    with pytest.raises(RuntimeError, match="Caught RuntimeError") as caught:
        list(DataLoader(_Broken(), num_workers=1))
    second.note(caught.value)
    lines = str(first.news()).splitlines()
    assert lines[0] == "rank 1 failed with RuntimeError: Caught RuntimeError in DataLoader worker process 0."
    assert lines[1].startswith("RuntimeError: no connection closed so badly (at ")
