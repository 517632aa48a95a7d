"""Underscore names of torch's compiler. Nothing here is imported before a region is compiled or loaded."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, fx

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def compiler_settings() -> str:
    """A hash of everything in the compiler's settings that may change the code it makes."""
    import torch._inductor.config as config

    settings: Any = config
    kept = {k: repr(v) for k, v in settings.save_config_portable().items()}
    host = f"{torch.get_num_threads()} {torch.backends.cpu.get_cpu_capability()} {_compiler()}"
    return hashlib.sha256(f"{sorted(kept.items())} {host}".encode()).hexdigest()


def _compiler() -> str:
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    try:
        return get_compiler_version_info(get_cpp_compiler())
    except Exception as error:  # there may be none; compilation will say so
        return type(error).__name__


def compile_with_inductor(
    function: Callable[..., Any],
    fakes: Sequence[Tensor],
    mode: Any,
    folder: Path | None,
    decompositions: Callable[[dict[Any, Any]], dict[Any, Any]] = dict,
    contract: bool = False,
) -> tuple[str, dict[str, bytes]]:
    """The code that Inductor makes of a function, and the libraries that belong to it by their place in its folder.

    Args:
        function: of tensors, gives a tuple of tensors; it may write into what it made itself.
        fakes: its arguments, of ``mode``.
        mode: a FakeTensorMode.
        folder: where Inductor keeps its files; None: where it always does.
        decompositions: changes the table of what operators are taken apart into.
        contract: whether the host may round a product and a sum once.

    Raises:
        Exception: of whatever kind the compiler ends with.
    """
    import torch._inductor.config as config
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    settings: Any = config
    functional = make_fx(torch.func.functionalize(function), decomposition_table=decompositions(select_decomp_table()))
    with _files_in(folder), torch.random.fork_rng(devices=[]), mode:
        traced: fx.GraphModule = functional(*fakes)
    output = traced.graph.find_nodes(op="output")[0]
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    with (
        _files_in(folder) as root,
        settings.patch(fx_graph_cache=False, compile_threads=1),
        settings.patch({"cpp.enable_floating_point_contract_flag": "fast"} if contract else {}),
        tracing(TracingContext(mode)),
    ):
        made: Any = compile_fx_inner(traced, list(fakes))
        if made.constants or made.mutated_input_idxs:
            raise RuntimeError("the code has constants of its own, or writes into its inputs")
        return made.source_code, _libraries(made.current_callable, root)


def load_inductor_code(
    source: str, files: dict[str, bytes], folder: Path | None
) -> Callable[[list[Any]], Sequence[Any]]:
    """Code of :func:`compile_with_inductor`, ready to be called with a list that it empties.

    Args:
        source: the code. It is run.
        files: its libraries; they are put into their place first.
        folder: where Inductor keeps its files; None: where it always does.
    """
    from torch._inductor.codecache import PyCodeCache

    with _files_in(folder) as root:
        for name, content in files.items():
            _put(root / name, content)
        return PyCodeCache.load(source).call


@contextlib.contextmanager
def _files_in(folder: Path | None) -> Iterator[Path]:
    """The compiler keeps its files in a folder meanwhile; gives the folder."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    before = os.environ.get(_FOLDER)
    if folder is not None:
        os.environ[_FOLDER] = str(folder)
    try:
        yield Path(cache_dir())
    finally:
        if before is None:
            os.environ.pop(_FOLDER, None)
        else:
            os.environ[_FOLDER] = before


def _libraries(code: Callable[..., Any], root: Path) -> dict[str, bytes]:
    """The libraries from which generated code took its kernels, by their place in the compiler's folder."""
    names = getattr(code, "__globals__", {}).values()
    modules = (getattr(value, "__self__", None) for value in names if isinstance(value, BuiltinFunctionType))
    found = {file for module in modules if (file := getattr(module, "__file__", None)) is not None}
    paths = [Path(file) for file in found if Path(file).is_relative_to(root)]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def _put(path: Path, content: bytes) -> None:
    if path.exists() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_name(f".{os.getpid()}-{path.name}")
    own.write_bytes(content)
    own.replace(path)


def profiler_is_on() -> bool:
    """Whether torch's profiler records; asked before each region, so it must cost nothing."""
    return torch.autograd.profiler._is_profiler_enabled
