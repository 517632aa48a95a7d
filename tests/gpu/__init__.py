"""The GPU script: ``python -m tests.gpu`` says in minutes whether this package is right on a GPU, and how fast.

``parts.py`` lists what it does, ``running.py`` runs each part in a process of its own, ``correctness.py``,
``two_ranks.py`` and ``benchmark.py`` are what runs there, ``table.py`` prints. ``--toy`` does all of it on a CPU.
"""
