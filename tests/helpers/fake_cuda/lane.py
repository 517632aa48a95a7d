"""What graphs for GPUs look like, on a machine without one: fake ``cuda`` tensors for torch's fake tensor mode.

``fake_cuda.cpp`` registers a device guard that knows eight devices, before torch looks for one. That is for a process
of its own, because torch then believes in GPUs everywhere (autograd starts a thread for each of them). :class:`Lane` is
such a process; it runs functions of modules, as ``tests.helpers.ranks`` does, but without a process group.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
_START = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
from {module} import serve
serve(sys.argv[1])
"""


def compiler() -> str | None:
    """The C++ compiler, or None."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "c++", "clang++"))), None)


def library() -> Path:
    """The compiled guard: made once for a source text, a torch and a compiler."""
    origin = importlib.util.find_spec("torch")
    assert origin is not None
    assert origin.origin is not None
    root = Path(origin.origin).parent
    folders = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    links = [f"-L{root}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root}/lib"]
    command = [str(compiler()), "-shared", "-fPIC", "-std=c++20", *folders, str(SOURCE), *links]
    text = "\0".join((importlib.metadata.version("torch"), *command)).encode() + SOURCE.read_bytes()
    folder = Path(tempfile.gettempdir()) / f"lightning_spmd_tests_{os.getuid()}"
    path = folder / f"fake_cuda_{hashlib.blake2b(text, digest_size=8).hexdigest()}.so"
    if not path.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        made = subprocess.run([*command, "-o", str(unfinished)], check=False, capture_output=True, text=True)
        assert made.returncode == 0, f"the fake device guard does not compile:\n{made.stderr[:4000]}"
        unfinished.replace(path)  # two processes may make it at once
    return path


class Lane:
    """A process in which ``cuda:0`` to ``cuda:7`` exist for fake tensors; started at the first :meth:`run`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that is importable by name there, and give what it returns; its exceptions fail the test."""
        if self._process is None:
            start = [sys.executable, "-c", _START.format(module=__name__), str(library())]
            self._process = subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        pickle.dump((function, args, kwargs), stdin)
        stdin.flush()
        try:
            value, error = pickle.load(stdout)
        except EOFError:
            code = self._process.wait()
            self._process = None
            raise AssertionError(f"the process with the fake devices ended with {code}; see its stderr") from None
        assert error is None, f"in the process with the fake devices:\n{error}"
        return value

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()


def serve(library_path: str) -> None:
    """The process: answers calls until its input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what functions print must not get between the answers
    import torch  # its own guard first: the last one that is registered is in use

    torch.set_num_threads(1)
    ctypes.CDLL(library_path).use_fake_guard()
    while True:
        try:
            function, args, kwargs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        except Exception:
            answer = None, traceback.format_exc()
        else:
            try:
                answer = function(*args, **kwargs), None
            except BaseException:
                answer = None, traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()
