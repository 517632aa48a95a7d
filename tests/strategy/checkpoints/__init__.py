"""Checkpoints and their files."""
