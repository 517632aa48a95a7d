"""Batches: of all ranks, each rank's own, packed, and how they lie in memory."""
