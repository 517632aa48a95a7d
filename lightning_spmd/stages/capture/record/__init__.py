"""Calls under a dispatch mode become one fx graph.

``recorder``        writes the graph, below autograd and above fake tensors
``fake_calls``      what a call gives on fake tensors; ``known_values``: true values of single numbers on the host
``function_calls``  calls of torch's functions as they were written; ``default_dtype``: two of them
``inputs``          fake tensors and recorded numbers, each with its placeholder and role
``around_trace``    modes, random state and errors around a trace; ``surroundings``: guards on what a step depends on
``packing``         outputs, gradients in their layout, a graph without dead nodes
"""
