"""Processes and what they say to each other.

``processes``   launcher and collectives; ``ranks``: mesh and groups; ``rendezvous``: at the start
``places``      where a rank is; ``alike``: what must be the same; ``boundary``: errors that name a lost rank
``slurm``, ``requeue``  SLURM; signals
"""
