"""Sizes that are open in a graph.

``other_sizes``  a batch with other sizes than it has
``data_sizes``   results as large as their data say
"""
