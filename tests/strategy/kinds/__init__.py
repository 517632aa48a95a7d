"""Every kind of Python state that a step may read, a class each."""
