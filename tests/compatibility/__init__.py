"""Models that nobody here wrote, through the Trainer: one process and two against one device. See ``__main__.py``."""
