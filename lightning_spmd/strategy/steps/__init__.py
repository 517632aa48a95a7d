"""One step: the user's Python, and the graph or the eager path behind it.

``iteration``     one micro-batch, from the batch to the result of ``training_step``; ``evaluation``: evaluation steps
``following``     the Python of a step; ``beginnings``, ``pieces``: graphs for what it reads before it has a graph
``told``          values that follow from those that it has read
``meeting``       ranks in one step on the global batch; ``own_meeting``, ``own_batches``: on local batches
``batch_changes`` what a step puts into its batch, for hooks
``replay``        ``self.log`` and metric calls, made when their values exist
``by_hand``, ``loss_scaling``          manual optimization; the GradScaler between graphs
``shared_leaves`` tensors of the batch that are equal on all ranks
``as_before``, ``last_resort``, ``eager_path``, ``evaluating``  steps that start over, and steps that are no graphs
"""
