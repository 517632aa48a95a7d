"""Co-execution: the user's Python runs in every step, once, on placeholders; what it computes is left to a graph.

``follower``      the modes of torch that see every call of a step: followed along a known path, or recorded
``notes``         what is known of a call: operands by where they come from, results, what is around it
``matching``      whether a call is the one that was noted, compiled for each note
``placeholders``  tensors without memory in place of results, filled when a step is over
``sizes``         integers that are formulas of the sizes of batches; ``counts``: of sizes that values decide
``same_calls``    masks that are computed again in the same way, which choose the same
``queue``         ``self.log`` and metric calls, made once the graph ran
``by_hand``       ``backward``, ``optimizer.step()``, ``.grad`` as calls of a step; ``worlds``: where they are made true
``engine``        autograd's engine while Python runs in a backward pass; ``functions``: the user's own functions and
                  hooks; ``saved``: hooks on saved tensors, checkpoints
``packed``        packed sequences; ``tripwires``, ``rows_read``: what of a batch is a rank's own
``program``       what a step showed once Python is done: its path, its numbers, which results somebody wants
``values``        notes made true: on fake tensors for capture, on real ones for a value that Python reads, or for good

Lazy tensors (torch_xla; "LazyTensor", 2021) and co-execution (Terra, NeurIPS 2021) are where the idea is from.
"""
