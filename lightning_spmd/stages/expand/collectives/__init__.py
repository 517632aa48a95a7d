"""Placement changes, written as functional collectives.

``exchange``         split dimensions before and after a collective: which elements belong to which rank
``reduce_scatter``   sums that end up split
``gather``           gathers of pieces, of blocks of unequal size, and of chunks
``redistribute``     from any placement to any other: its cost in bytes, and its program
"""
