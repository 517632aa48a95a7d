"""Experts split over a tensor axis, whose ranks share tokens, or over a data axis, whose ranks have their own.

``regions``              finds where experts work in a captured graph, and marks it
``split_experts``        placements and local programs of marked operators on a tensor axis
``exchanged_experts``    the same on a data axis, where ``rows/routing`` asks for them
"""
