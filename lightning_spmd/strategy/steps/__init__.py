"""One step: the user's Python, and the graph or the eager path behind it.

``iteration``     one micro-batch from the batch to what ``training_step`` returns; ``evaluation``: of evaluation steps
``following``     the Python of a step; ``reading``: what it reads where there is no graph yet
``meeting``       ranks in one step on one batch; ``own_meeting``, ``own_batches``: on a batch of each rank's own
``replay``        ``self.log`` and metric calls, once values are there
``by_hand``, ``loss_scaling``          optimization by hand; the GradScaler between graphs
``shared_leaves``, ``same_draws``      what of a batch and of random numbers is the same on all ranks
``as_before``, ``last_resort``, ``eager_path``, ``evaluating``  a step begun anew, and steps that are no graphs
"""
