"""Functions with a backward of their own that lead to no parameter: ``loss.backward()`` would run them all the same.

Capture asks for the gradients of parameters alone, so such a backward would be left out. One case is the reentrant form
of ``torch.utils.checkpoint`` if only the data requires gradients (``x.requires_grad_()``,
``enable_input_require_grads()``): its backward runs another backward pass, which gives the parameters theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from lightning_spmd.errors import CaptureError
from lightning_spmd.stages.capture.follow.placeholders import place_at_end


def check_backward(loss: Tensor, trained: Iterable[Tensor]) -> None:
    """Check that asking for the parameters' gradients runs all that ``loss.backward()`` would.

    Args:
        loss: with its graph.
        trained: the parameters.

    Raises:
        CaptureError: naming the function that would be left out, or the tensor into which there is no way.
    """
    order = _from_the_loss(loss.grad_fn)
    if places := [place for node in order if (place := place_at_end(node)) is not None]:
        raise CaptureError(f"the backward pass reaches a tensor that an earlier step computed ({places[0]})")
    own = [node for node in order if isinstance(node, BackwardCFunction)]
    if not own:
        return
    wanted = {id(parameter) for parameter in trained}
    reaching: set[Any] = set()
    for node in reversed(order):  # what comes after a node in the backward pass is decided before it
        below = any(other in reaching for other, _ in node.next_functions if other is not None)
        if below or id(getattr(node, "variable", None)) in wanted:
            reaching.add(node)
    for node in own:
        if node not in reaching:
            name = type(node).__name__.removesuffix("Backward")
            advice = "; checkpoint(..., use_reentrant=False) has none" if name == "CheckpointFunction" else ""
            raise CaptureError(
                f"{name} has a backward of its own, but only data and no trained parameter is behind it, so a graph "
                f"would leave it out{advice}"
            )


def leaves_of(roots: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that ``backward`` of the roots would give a gradient, in the order in which they are met.

    What was frozen since, as ``toggle_optimizer`` does behind a forward pass, gets none.
    """
    found: dict[int, Tensor] = {}
    for root in roots:
        if root.grad_fn is None and root.requires_grad:
            found[id(root)] = root
        for node in _from_the_loss(root.grad_fn):
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                found[id(leaf)] = leaf
    return list(found.values())


def _from_the_loss(root: Any) -> list[Any]:
    """All nodes of the backward pass, each before those that come after it."""
    order: list[Any] = []
    entered: set[Any] = set()
    stack: list[tuple[Any, bool]] = [(root, False)]
    while stack:
        node, left = stack.pop()
        if left:
            order.append(node)
        elif node is not None and node not in entered:
            entered.add(node)
            stack.append((node, True))
            stack += [(other, False) for other, _ in node.next_functions]
    return order[::-1]
