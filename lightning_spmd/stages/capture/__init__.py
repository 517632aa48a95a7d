"""LightningModule + optimizer + sample batch → CapturedStep: one graph, global shapes, typed signature.

Import order:
``host_scalar < recorder < inputs < batch, appended_lists
< log_recorder, python_state, optimizer_swap, decisions < trace``.
"""
