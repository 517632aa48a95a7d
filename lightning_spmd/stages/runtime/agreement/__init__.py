"""Exchanges of a few numbers among the ranks, on the host.

``control``           the ranks' meetings: place in the run, graph, rows, stop
``shared_numbers``    the same on one machine, through shared memory
``same_graphs``       whether all ranks have built the same graph
``lost_ranks``        which rank is gone, and why
``whereabouts``       where a rank stays that does not come
"""
