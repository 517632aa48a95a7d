"""Which module's ``forward`` is running in this thread, through torch's global module hooks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


@contextlib.contextmanager
def module_paths(root: nn.Module) -> Iterator[Callable[[], str]]:
    """A function that names the module whose ``forward`` runs."""
    paths = {id(module): path for path, module in root.named_modules()}
    stack = [""]
    thread = threading.get_ident()

    def enter(module: nn.Module, _: Any) -> None:
        if threading.get_ident() == thread:
            stack.append(paths.get(id(module), stack[-1]))

    def leave(_: nn.Module, __: Any, ___: Any) -> None:
        if threading.get_ident() == thread:
            stack.pop()

    before = register_module_forward_pre_hook(enter)
    after = register_module_forward_hook(leave, always_call=True)
    try:
        yield lambda: stack[-1]
    finally:
        before.remove()
        after.remove()
