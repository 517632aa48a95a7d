"""What things cost, computed from specs and graphs alone: the same answer on every rank, in every run.

Nothing here measures. Decisions that follow from these numbers (which gradients share a bucket) decide the order of
floating-point sums, so they must not differ between ranks or between runs.
"""
