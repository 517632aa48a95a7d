"""Lightning's side: hooks in, hooks out; no graph code.

``spmd_strategy``  the strategy; ``options``: its arguments; ``modes``, ``training``: how a fit runs
``steps/``         one step: the user's Python, the ranks that meet in it, its graph or the eager path
``graphs/``        found, chosen by all ranks, or built
``user_hooks/``    hooks between iterations that overlap, and on gradients
``state/``         parameters, optimizer state and random state; ``checkpoints/``: their files
``ranks/``         processes, where they are, lost ones, SLURM
``support/``       the support matrix and how its rows are noticed
``notices/``       what a run says
"""
