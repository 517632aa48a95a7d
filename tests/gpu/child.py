"""The process of one part: ``python -m tests.gpu.child MODULE:FUNCTION --result FILE``."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.gpu.running import SECONDS


class NotRun(Exception):
    """The part cannot be run here; the message says why."""


@dataclass(frozen=True)
class Setting:
    """How a part runs.

    Args:
        toy: at toy size.
        device: ``"cuda"`` or ``"cpu"``.
        result: the file for what it finds.
        traces: folder for Chrome traces.
        sides: of a benchmark; empty: all.
        deadline: by ``time.monotonic``, when the part is killed.
    """

    toy: bool
    device: str
    result: Path
    traces: Path
    deadline: float = math.inf
    sides: tuple[str, ...] = ()

    def write(self, data: dict[str, Any]) -> None:
        """Keep what was found so far; a part that is killed later has at least said this."""
        unfinished = self.result.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(data))
        unfinished.replace(self.result)

    @property
    def trainer_flags(self) -> dict[str, Any]:
        """Of every Trainer: nothing but training, on one device."""
        return {
            "accelerator": "gpu" if self.device == "cuda" else "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
            "max_epochs": -1,
        }


def settle(device: str) -> None:
    """Wait until the device has done everything."""
    if device == "cuda":
        torch.cuda.synchronize()


def exact() -> None:
    """float32 means float32, and convolutions add in a fixed order: cuDNN would do otherwise by itself."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    in_fixed_order(True)


def in_fixed_order(is_fixed: bool) -> None:
    """Whether convolutions add in a fixed order."""
    torch.backends.cudnn.deterministic = is_fixed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("function")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--argument", default="")
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--sides", default="")
    options = parser.parse_args()
    deadline = time.monotonic() + float(os.environ.get(SECONDS, "inf"))
    device, sides = "cpu" if options.toy else "cuda", tuple(filter(None, map(str.strip, options.sides.split(";"))))
    setting = Setting(options.toy, device, options.result, options.traces, deadline, sides)
    module, _, function = options.function.partition(":")
    compiled = Path(tempfile.mkdtemp(prefix="lightning_spmd_gpu_compiled_"))
    if not options.toy:  # first steps are told as they are without kernels of an earlier run
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compiled)
    try:
        if setting.device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU")
        data = getattr(importlib.import_module(f"tests.gpu.{module}"), function)(setting, options.argument)
    except NotRun as reason:
        data = {"not_run": str(reason)}
    except BaseException as error:
        traceback.print_exc()
        before = json.loads(setting.result.read_text()) if setting.result.exists() else {}
        data = {**before, "passed": False, "reason": f"{type(error).__name__}: {str(error)[:600]}"}
    setting.write(data)
    shutil.rmtree(compiled, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if data.get("passed") or "not_run" in data else 1)  # threads of a failed part must not keep it


if __name__ == "__main__":
    main()
