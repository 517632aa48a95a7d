"""Runs iteration graphs on live parameters; makes the ranks agree; random numbers of several ranks."""
