"""Rewrites of the captured graph for one mesh axis, before placements are chosen.

``shared_casts``    one cast for all its readers, so that its result is gathered once
``ignored_rows``    rows that a loss cuts away become rows that it ignores
``associate``       partial sums are added first and reduced once; it needs the placements of a first propagation
"""
