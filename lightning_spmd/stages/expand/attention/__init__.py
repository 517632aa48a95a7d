"""Attention over a sequence that is split over the ranks of a context axis.

``kernels``             torch's kernels on parts of queries and keys, and how their results are merged
``gathered_attention``  keys are gathered
``ring_attention``      keys travel in a ring

``rules/attention`` lists these layouts; ``cost/attention.py`` chooses.
"""
