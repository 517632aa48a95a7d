"""``experts``: the experts of a mixture, in one of two forms.

*A stack*, a module with weights of shape (experts, in, out) or (experts, out, in): every parameter of the module's own
with that many entries, biases of shape (experts, out) included, is split by experts; anything else of it is whole. Each
rank has some experts, and multiplies the rows that are routed to them.

*A list* of modules with linear layers (``nn.ModuleList`` of MLPs): each expert is split by its hidden features, as
``colwise`` and ``rowwise`` do. Each rank has its part of every expert, so ranks work alike however rows are routed. The
width of the model is what the first layer of an expert takes: layers from it are ``colwise``, layers back to it
``rowwise``.
"""

from __future__ import annotations

from torch import nn

from lightning_spmd.parallel.styles.colwise import place as split_outputs
from lightning_spmd.parallel.styles.rowwise import place as split_inputs
from lightning_spmd.parallel.styles.target import PlacementsByName, Target

STACK = 3
"""Dimensions of one matrix an expert."""


def place(target: Target) -> PlacementsByName:
    """Placements of all parameters by expert, or of the layers of a list of experts."""
    target.known_options()
    own = dict(target.module.named_parameters(recurse=False))
    stacks = {name: weight for name, weight in own.items() if weight.ndim == STACK}
    if not stacks and isinstance(target.module, nn.ModuleList) and target.axis == "tensor_parallel":
        return _of_list(target)
    if not stacks:
        raise target.error(
            "it has no parameter of its own with one matrix an expert, shape (experts, in, out); choose the module "
            "that holds the stacked weights"
        )
    counts = {weight.shape[0] for weight in stacks.values()}
    if len(counts) > 1:
        shapes = ", ".join(f"{name!r} {list(weight.shape)}" for name, weight in stacks.items())
        raise target.error(f"its stacked weights are of different numbers of experts: {shapes}")
    (count,) = counts
    return {
        name: target.split(weight, 0, "experts")
        for name, weight in own.items()
        if weight.ndim > 1 and weight.shape[0] == count
    }


def _of_list(target: Target) -> PlacementsByName:
    found: PlacementsByName = {}
    for number, expert in target.module.named_children():
        layers = {name: layer for name, layer in expert.named_modules() if isinstance(layer, nn.Linear)}
        width = next((layer.in_features for layer in layers.values()), None)
        styles: set[str] = set()
        for name, layer in layers.items():
            into, back = layer.in_features == width, layer.out_features == width
            if into == back:
                raise target.error(
                    f"layer '{number}.{name}' takes {layer.in_features} and gives {layer.out_features} features, and "
                    f"the first one of its expert takes {width}: give each layer 'colwise' or 'rowwise'"
                )
            style = "colwise" if into else "rowwise"
            styles.add(style)
            own = Target(f"{target.path}.{number}.{name}", layer, style, target.size)
            placed = split_outputs(own) if into else split_inputs(own)
            prefix = f"{number}.{name}." if name else f"{number}."
            found.update({prefix + key: placement for key, placement in placed.items()})
        if len(styles) < 2:
            raise target.error(
                f"expert {number!r} has no linear layers from the width of the model to hidden features and back"
            )
    return found
