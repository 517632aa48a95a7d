"""Sizes that are open in a graph.

``symbolic_batch``  sizes of a batch as symbols; ``symbolic_family``: the captured steps for all of them
``data_sizes``      results as large as their data say
"""
