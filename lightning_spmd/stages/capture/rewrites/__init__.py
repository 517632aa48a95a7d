"""The first rewrites of a captured graph.

``simplify``, ``windows``  detours that hide a dimension; ``weight_casts``: one cast of a weight a step
``reads``                  until Python has read last, nothing that outlives the step is changed
"""
