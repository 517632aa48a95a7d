"""How one module is split over the ranks of a tensor-parallel axis, one style a file.

==============  ==================================================  ==========================================
style           what is split                                       what the module takes and gives
==============  ==================================================  ==========================================
``colwise``     output features of weight and bias                  whole input → split features
``rowwise``     input features of the weight, the bias is whole     split features → partial sum, reduced once
``embedding``   rows of the table (the vocabulary)                  indices → partial sum, reduced once
``loss``        as ``colwise``, for the projection to the classes   cross-entropy sees split classes, no scores
``experts``     a stack of experts by expert, hidden features of    rows sorted by expert → partial sum of rows;
                those in a list                                     whole → partial sum, reduced once for all
``sequence``    nothing                                             works on its piece of the sequence
``replicate``   nothing                                             whole → whole
==============  ==================================================  ==========================================

To add one: a file with a ``place`` function, and its line in :data:`STYLES`.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_spmd.parallel.styles import colwise, embedding, experts, loss, replicate, rowwise, sequence
from lightning_spmd.parallel.styles.target import PlacementsByName, Target

Style = Callable[[Target], PlacementsByName]
"""Target → placement of each of the module's own parameters and buffers by name; what is left out is replicated."""

STYLES: dict[str, Style] = {
    "colwise": colwise.place,
    "rowwise": rowwise.place,
    "embedding": embedding.place,
    "loss": loss.place,
    "experts": experts.place,
    "sequence": sequence.place,
    "replicate": replicate.place,
}

__all__ = ["STYLES", "PlacementsByName", "Style", "Target"]
