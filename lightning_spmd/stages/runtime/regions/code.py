"""Makes code of regions, and keeps it on disk by content.

An entry of the store holds the source that Inductor wrote and the libraries that it built, by name: nothing of it is a
pickle. The key is a hash of the region's text (operators, arguments, specs), of the compiler's settings, of the device
and of the versions of torch and of this package.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_spmd import _private_api as private
from lightning_spmd.cache import Store, the_store
from lightning_spmd.ir.node_info import spec_of
from lightning_spmd.messages import tell
from lightning_spmd.stages.runtime.regions.contraction import may_contract
from lightning_spmd.stages.runtime.regions.own_kernels import with_own_kernels
from lightning_spmd.stages.runtime.regions.region import Region

KIND = "region"
"""Of entries in the store."""
_VERSION = 5
"""Of what is stored; another one is another key."""

Code = Callable[[list[Any]], Sequence[Any]]
"""Takes a list of inputs, which it empties, and gives outputs."""


@dataclass
class Counts:
    """What happened to regions in this process.

    Args:
        compiled: regions that were compiled.
        loaded: regions that were read from disk.
        failed: regions that could not be compiled.
        seconds: that compiling took.
    """

    compiled: int = 0
    loaded: int = 0
    failed: int = 0
    seconds: float = 0.0


@dataclass
class Codes:
    """The code of all regions of this process.

    Args:
        counts: what happened.
        problems: why a region has no code, by key.
    """

    counts: Counts = field(default_factory=Counts)
    problems: dict[str, str] = field(default_factory=dict[str, str])
    _known: dict[str, Code] = field(default_factory=dict[str, Code])

    def known(self, region: Region) -> Code | None:
        """The code of a region, if there is any by now."""
        return self._known.get(entry_of(region))

    def load(self, region: Region, store: Store | None = None) -> bool:
        """Whether there is code for a region, in this process or on disk."""
        key, kept = entry_of(region), the_store() if store is None else store
        if key in self._known:
            return True
        content = kept.get(KIND, key)
        if content is None:
            return False
        try:
            entry = json.loads(content)
            files = {name: base64.b64decode(text) for name, text in entry["files"].items()}
            self._keep(key, region, private.load_inductor_code(entry["source"], files, kept.subfolder("inductor")))
        except Exception as error:  # generated code may fail in every way; it is made anew
            tell(f"strategy='spmd' compiles {region.name} anew: {_first_line(error)}")
            return False
        self.counts.loaded += 1
        return True

    def make(self, region: Region, store: Store | None = None) -> bool:
        """Compile a region unless there is code for it; whether there is some then."""
        key, kept = entry_of(region), the_store() if store is None else store
        if key in self.problems:
            return False
        if self.load(region, kept):
            return True
        begun, folder = time.perf_counter(), kept.subfolder("inductor")
        try:
            mode = private.FakeTensorMode()
            fakes = [private.new_fake(mode, spec_of(node)) for node in region.inputs]
            source, files = private.compile_with_inductor(
                region.function, fakes, mode, folder, with_own_kernels, may_contract(region)
            )
            self._keep(key, region, private.load_inductor_code(source, files, folder))
        except Exception as error:  # a compiler may fail in every way, and the region is there without it
            self.problems[key] = _first_line(error)
            self.counts.failed += 1
            return False
        self.counts.compiled += 1
        self.counts.seconds += time.perf_counter() - begun
        texts = {name: base64.b64encode(content).decode() for name, content in files.items()}
        kept.put(KIND, key, json.dumps({"source": source, "files": texts}).encode())
        return True

    def _keep(self, key: str, region: Region, code: Code) -> None:
        on_device = any(spec_of(node).device.type == "cuda" for node in region.inputs)
        self._known[key] = aligned(code) if on_device else code

    def problem(self, region: Region) -> str:
        """Why there is no code for a region."""
        return self.problems.get(entry_of(region), "there is no code for it")

    def forget(self) -> None:
        """Begin anew, as a process does."""
        self._known.clear()
        self.problems.clear()
        self.counts = Counts()


CODES = Codes()
"""Of this process: layers, graphs and fits with equal regions share their code."""


def entry_of(region: Region) -> str:
    """The name of a region's entry in the store."""
    devices = sorted({str(spec_of(node).device) for node in (*region.inputs, *region.outputs)})
    kinds = [_kind_of(torch.device(device)) for device in devices]
    return _hash((_VERSION, _settings(torch.get_num_threads()), tuple(kinds), region.text))


def aligned(code: Code) -> Code:
    """Code of a GPU, which reads 16 bytes at once: an input that does not begin at a multiple of them is copied."""

    def call(inputs: list[Any]) -> Sequence[Any]:
        for number, value in enumerate(inputs):
            if value.data_ptr() % 16:
                reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
                inputs[number] = value.as_strided((reach,), (1,)).clone().as_strided(value.shape, value.stride())
        return code(inputs)

    return call


# ---------------------------------------------------------------- pieces
@functools.cache
def _settings(_threads: int) -> str:
    return private.compiler_settings()


@functools.cache
def _kind_of(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device} {platform.machine()}"
    facts = torch.cuda.get_device_properties(device)
    return f"{device} {facts.name} {facts.major}.{facts.minor} {torch.version.cuda}"


def _hash(parts: tuple[Any, ...]) -> str:
    return hashlib.sha256(repr((torch.__version__, platform.python_version(), *parts)).encode()).hexdigest()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
