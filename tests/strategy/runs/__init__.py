"""Whole runs: features, options, wrong input."""
