"""Optimizers, their state, loss scaling."""
