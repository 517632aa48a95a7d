"""Two ranks against one device: by NCCL where it lets two processes share a GPU, else through the host.

Few steps: sums over two halves are rounded otherwise than over the whole, and training makes more of that every step.
"""

from __future__ import annotations

import datetime
import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from lightning_spmd import SPMDStrategy
from tests.gpu import through_host
from tests.gpu.child import Setting, exact
from tests.gpu.correctness import (
    FEW_STEPS,
    ROWS,
    TOLERANCE,
    Losses,
    Run,
    judged,
    made,
    row_reason,
    state_of,
    two_eager_runs,
)

PLANS: dict[str, dict[str, Any]] = {
    "replicate": {"data_parallel": "replicate"},
    "zero2": {"data_parallel": "zero2"},
    "zero3": {"data_parallel": "zero3"},
    "tensor parallel": {"tensor_parallel_size": 2, "tensor_parallel_plan": "auto"},
}
RUNS = [*(("llama", plan) for plan in PLANS), ("conv", "replicate"), ("conv", "zero3")]
PROBE_SECONDS, RUN_SECONDS, TOY_SECONDS = 25.0, 80.0, 600.0


def equal_one_device(setting: Setting, _argument: str) -> dict[str, Any]:
    """Several models and plans on two ranks, against one device on the batches of both."""
    exact()
    backend, why = (through_host.NAME, "there is no GPU") if setting.device == "cpu" else _backend(setting)
    rows: list[dict[str, Any]] = []
    data: dict[str, Any] = {"kind": "equality", "rows": rows, "backend": backend, "note": f"{backend}: {why}"}
    found = _on_two_ranks(setting, "train", backend, TOY_SECONDS if setting.toy else RUN_SECONDS)
    for name in dict.fromkeys(name for name, _ in RUNS):
        eager = two_eager_runs(setting, name, "32-true", FEW_STEPS)
        for plan in (plan for other, plan in RUNS if other == name):
            row = judged(found[name, plan], eager, TOLERANCE)
            rows.append({"model": f"{name}, {plan}", "precision": "32-true", "ranks": 2, **row})
            setting.write(data)
    wrong = [f"{row['model']}: {row_reason(row)}" for row in rows if not row["passed"]]
    return {**data, "passed": not wrong, "reason": "; ".join(wrong)}


def _backend(setting: Setting) -> tuple[str, str]:
    try:
        _on_two_ranks(setting, "probe", "nccl", PROBE_SECONDS)
    except RuntimeError as error:
        return through_host.NAME, f"NCCL does not share the GPU ({str(error).splitlines()[-1][:120]})"
    return "nccl", "NCCL shares the GPU"


def _on_two_ranks(setting: Setting, job: str, backend: str, seconds: float) -> Any:
    """What rank 0 of two processes finds; each is a node of one device for Lightning, so both take the same GPU.

    Raises:
        RuntimeError: a rank failed, or took too long.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    files = [setting.result.with_suffix(f".rank{rank}") for rank in range(2)]
    processes = []
    for rank, file in enumerate(files):
        file.unlink(missing_ok=True)
        told = {
            **os.environ,
            **{"RANK": str(rank), "GROUP_RANK": str(rank), "NODE_RANK": str(rank), "LOCAL_RANK": "0"},
            **{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            **{"TORCHELASTIC_RUN_ID": "gpu", "TORCHELASTIC_USE_AGENT_STORE": "False"},
        }
        start = [sys.executable, "-m", __name__, job, backend, str(file), "toy" if setting.toy else setting.device]
        log = file.with_suffix(f".rank{rank}.log").open("w")
        processes.append((subprocess.Popen(start, env=told, stdout=log, stderr=log), Path(log.name)))
    deadline = time.monotonic() + seconds
    for process, log_path in processes:
        try:
            code = process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            for other, _ in processes:
                other.kill()
                other.wait()
            said = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
            what = f"no end after {seconds:.0f} s" if code is None else f"exit code {code}"
            raise RuntimeError("\n".join([f"{job} by {backend}: {what}", *said[-6:]]))
    return pickle.loads(files[0].read_bytes())  # our own processes wrote it


# ---------------------------------------------------------------------- a rank
def _probe(backend: str) -> bool:
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=PROBE_SECONDS))
    value = torch.ones(4, device="cuda")
    dist.all_reduce(value)
    shared = bool(value.eq(2).all())
    dist.destroy_process_group()
    return shared


def _train(setting: Setting, backend: str) -> dict[tuple[str, str], Run]:
    exact()
    return {(name, plan): _fit(setting, name, plan, backend) for name, plan in RUNS}


class _Parts(L.LightningDataModule):
    """This rank's part of each batch; all of it where ranks share their rows."""

    def __init__(self, data: list[Any]) -> None:
        super().__init__()
        self.data = data

    def train_dataloader(self) -> Any:
        ranks = self.trainer.strategy.distributed_sampler_kwargs  # type: ignore[union-attr]
        sampler = DistributedSampler(self.data, **ranks, shuffle=False)  # type: ignore[arg-type]
        return DataLoader(self.data, batch_size=ROWS // ranks["num_replicas"], sampler=sampler)  # type: ignore[arg-type]


def _fit(setting: Setting, name: str, plan: str, backend: str) -> Run:
    module, data = made(name, toy=setting.toy)
    losses, run = Losses(), Run(before=state_of(module))
    strategy = SPMDStrategy(**PLANS[plan], process_group_backend=backend)
    flags = {**setting.trainer_flags, "max_steps": FEW_STEPS, "num_nodes": 2, "callbacks": [losses]}
    trainer = L.Trainer(strategy=strategy, **flags)
    trainer.fit(module, _Parts(data))
    run.losses = [float(value) for value in losses.values]
    with strategy.full_parameters():
        run.after = state_of(module)
    run.mode, run.captures = str(strategy.mode), strategy.captures
    return run


def main() -> None:
    job, backend, file, device = sys.argv[1:]
    through_host.register()
    setting = Setting(device == "toy", "cpu" if device == "toy" else device, Path(file), Path(file).parent)
    found: Any = _probe(backend) if job == "probe" else _train(setting, backend)
    if os.environ["RANK"] == "0":
        Path(file).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
