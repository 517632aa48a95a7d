"""The user's hooks beside graphs that are still at work.

``overlap``  whether iterations may overlap; ``overlapping``, ``fence``: hooks between them find finished weights
``pauses``   hooks on gradients, in an iteration that pauses before its update
"""
