"""Lightning's side: hooks, and the choice of what runs; no graph code.

``spmd_strategy``  the strategy; ``options``: its arguments; ``modes``, ``training``: how a fit runs
``steps/``         one step: the user's Python, the ranks that meet in it, its graph or the eager path
``graphs/``        graphs: found, chosen by all ranks, or built
``user_hooks/``    hooks between iterations that overlap, and hooks on gradients
``state/``         parameters, optimizer state and random state; ``checkpoints/``: their files
``ranks/``         processes, their places in the run, lost ranks, SLURM
``support/``       the support matrix and its detectors
``notices/``       messages of a run
"""
