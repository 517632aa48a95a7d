"""The batch of a step.

``batch``         its leaves; ``rows_of_rank``: what counts this rank's rows; ``own_batch``: a rank's own batch
"""
