"""Optimization by hand."""
