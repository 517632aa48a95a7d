"""Regions of a final graph that a compiler takes: ``SPMDStrategy(lowering="auto")`` or ``"inductor"``.

``eligible.py`` says which nodes, ``partition.py`` cuts the order into runs of them, ``region.py`` makes a function of
each, ``code.py`` compiles it or reads it from disk, ``trial.py`` compares and measures, ``choice.py`` and
``lowering.py`` decide. With ``lowering="none"`` nothing of this is imported.
"""
