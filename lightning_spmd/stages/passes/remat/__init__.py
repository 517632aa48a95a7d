"""Pieces of ``rematerialize``: what is kept for the backward pass, what that costs, which of it is recomputed."""
