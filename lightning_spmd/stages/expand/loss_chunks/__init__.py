"""``loss_chunks``: head, loss and their gradients in a loop over chunks of a rank's rows.

``row_chains``    the operators that work row by row, from the head's product to sums over rows
``row_chunks``    the loop over chunks
"""
