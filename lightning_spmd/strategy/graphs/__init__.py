"""The graphs of a run: found, built, and chosen by all ranks together.

``graph_table``  the graphs of a run and the one that fits a step; ``open_sizes``: which sizes of batches vary
``vote``         the ranks' vote on the graph of a step
``building``     capture, expansion, passes, agreement; ``own_graphs``: graphs of local batches
``run_context``  the objects that graphs are built from; ``live_inputs``: the live values of a graph's inputs
``first_step``   the optimizer's state before the first graph of its step
"""
