"""Chooses the placement of every value along one mesh axis.

``sequences``       where a context-parallel axis begins to split sequences
``own_batches``     the axis of local batches: what depends on the batch is the rank's own
``activations``     partial sums and sequence shards between tensor-parallel layers
``late_sums``       which partial sums are better reduced later than at their first reader
``placing``         the placements known so far, what a layout costs, and what a write changes
``propagate``       the pass over the graph: for each operator the cheapest legal layout
"""
