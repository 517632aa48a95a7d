"""Passes over the optimizer's update: joined into operators on lists, into fused kernels, split along buckets."""
