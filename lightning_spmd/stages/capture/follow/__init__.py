"""Co-execution: the user's Python runs in every step, once, on placeholders; a graph computes the results.

``follower``      the modes of torch that see every call of a step: followed along a known path, or recorded
``notes``         a noted call: the origins of its operands, its results, torch's switches
``matching``      compares a call with a note, by a function that is compiled for the note
``placeholders``  tensors without memory in place of results, filled when a step is over
``sizes``         integers that are formulas of the sizes of batches; ``counts``: of sizes that values decide
``same_calls``    masks that are computed again in the same way, and so choose the same rows
``queue``         ``self.log`` and metric calls, executed when the graph has run
``by_hand``       ``backward``, ``optimizer.step()`` and ``.grad`` as calls; ``worlds``: four ways to execute them
``engine``        autograd's engine while Python runs in a backward pass; ``functions``: the user's own functions and
                  hooks; ``saved``: hooks on saved tensors, checkpoints
``packed``        packed sequences; ``tripwires``, ``rows_read``: parts of a batch that only one rank has
``program``       a step when Python is done: its path, its numbers, the results that are wanted
``values``        runs notes: on fake tensors for capture, on copies for a value that Python reads, or eagerly

Lazy tensors (torch_xla; "LazyTensor", 2021) and co-execution (Terra, NeurIPS 2021) are where the idea is from.
"""
