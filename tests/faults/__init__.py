"""The faults that ``tests/mutants.py`` plants."""
