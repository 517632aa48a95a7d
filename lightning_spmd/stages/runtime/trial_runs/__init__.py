"""The runs of a graph before it is final.

``first_run``     checks the memory layout of each result
``profile``       measures the time of each node
``trial_runs``    the two kinds of runs, as states of an executable
"""
