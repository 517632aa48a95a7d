"""Parts of ``rematerialize``: what is kept for the backward pass, what recomputation costs, and what is recomputed."""
