"""Passes over the optimizer's update: joined into operators on lists, split along buckets."""
