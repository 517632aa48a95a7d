"""Tests of lightning_spmd."""
