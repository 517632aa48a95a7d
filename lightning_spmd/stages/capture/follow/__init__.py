"""Co-execution: the user's Python runs in every step, once, on placeholders; a graph computes the results.

``step``          the modes of torch that see every call of a step: followed along a known path, or recorded
``follower``      the known paths of all steps; ``step_state``: what is known of one step
``recorder``      a new call on fake tensors becomes a note; ``notes``: the origins of its operands, its results
``refused_dtypes``  dtypes that a kernel does not take, which fake tensors do not know
``matching``      compares a call with a note, by a function that is compiled for the note
``placeholders``  tensors without memory in place of results, filled when a step is over
``reads``         Python reads values; ``copies``: calls that run for a value before a graph gives it
``becoming``      a tensor becomes another one (``.data =``, ``transpose_``); ``memory``: shared with arrays and others
``own_generator`` torch's random generator, whose state is read and set by calls
``sizes``         integers that are formulas of the sizes of batches; ``data_counts``, ``counts``: of counts of rows
``same_calls``    masks that are computed again in the same way, and so choose the same rows
``queue``         ``self.log`` and metric calls, executed when the graph has run
``by_hand``       ``backward``, ``optimizer.step()`` and ``.grad`` as calls; ``worlds``: four ways to execute them
``engine``        autograd's engine while Python runs in a backward pass; ``functions``: the user's own functions and
                  hooks; ``saved``: hooks on saved tensors, checkpoints
``packed``        packed sequences; ``tripwires``, ``rows_read``: parts of a batch that only one rank has
``wrapped``       tensors of transforms of ``torch.func``, behind which a step cannot go on eagerly
``eager_run``     a step that cannot be followed goes on eagerly; ``left_out``: calls of one rank alone
``program``       a step when Python is done: its path, its numbers, the results that are wanted
``values``        runs notes: on fake tensors for capture, on copies for a value that Python reads, or eagerly

Lazy tensors (torch_xla; "LazyTensor", 2021) and co-execution (Terra, NeurIPS 2021) are where the idea is from.
"""
