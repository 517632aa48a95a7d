"""Python numbers that are inputs of a graph.

``host_scalar``  numbers with arithmetic that is recorded
``decisions``    branches on them, as a guard
``opened``       numbers that torch took as plain ones
"""
