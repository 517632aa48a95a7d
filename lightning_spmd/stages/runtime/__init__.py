"""Runs iteration graphs on live state.

``executor``          a captured step, the graphs made of it, and their runs
``trial_runs/``       the runs before the graphs are final: one checks memory layouts, others measure
``lowering``          a final graph becomes a callable: Python, ``regions/`` (compiled), or ``cuda_graphs/``
``live_state``        reads the inputs of a graph, and stores its results
``random_streams``    random numbers of several ranks
``ahead``             a run that begins while the ranks still compare what each of them would run
``value_reads``       a run that hands values to Python and waits; ``pausing``: one that pauses before its update
``switches``          autograd, autocast and the default dtype while graphs run
``undo``              what a run changes, kept so that the run can be undone
``waiting``           how long graphs wait for collectives; ``stopwatch``: the time of every line of a graph
``agreement/``        exchanges in which ranks agree, and what happens if one is lost
"""
