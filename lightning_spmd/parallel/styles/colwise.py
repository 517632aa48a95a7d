"""``colwise``: output features are split. The input is whole, the output is split, nothing is communicated.

Options: ``parts``, for projections that hold several things behind one another (query, key and value; gate and up):
the number of equal parts, or their sizes (``[64, 16, 16]`` with grouped queries); every part is split on its own.
``transposed``: the weight has shape (in, out). A normalization of channels (batch norm) may be colwise too: its
vectors, running statistics included, are split as the channels that it works on.
"""

from __future__ import annotations

from lightning_spmd.parallel.styles.target import PlacementsByName, Target


def place(target: Target) -> PlacementsByName:
    """PlacementsByName of weight and bias."""
    target.known_options("parts", "transposed")
    vectors = target.channel_vectors()
    if vectors:
        tensors = dict([*target.module.named_parameters(recurse=False), *target.module.named_buffers(recurse=False)])
        return {name: target.split(tensors[name], 0, "channels") for name in vectors}
    _, out = target.features()
    target.check_groups()
    placements: PlacementsByName = {"weight": target.split(target.weight, out, "output features")}
    if (bias := target.bias) is not None:
        placements["bias"] = target.split(bias, 0, "output features")
    return placements
