"""The graphs of a run: found, built, chosen by all ranks.

``graph_table``  the graphs and which one fits; ``open_sizes``: which sizes of batches vary
``vote``         the vote of the ranks
``building``     capture, expansion, passes, agreement; ``one_for_all_sizes``: of many sizes; ``own_graphs``: of own
                 batches
``run_context``  the objects that graphs are made in; ``live``: where their inputs are; ``not_built``: why there is none
``first_step``, ``prepared_optimizers``  optimizers before a graph of their step
"""
