"""Experts split over a tensor axis.

``regions``          finds where experts work in a captured graph, and marks it
``split_experts``    placements and local programs of marked operators
"""
