"""Processes: launched, agreed, lost, requeued."""
