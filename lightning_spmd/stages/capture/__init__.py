"""A step whose Python ran, its optimizer and its batch → CapturedStep: one graph, global shapes, typed signature.

``follow/``           the user's Python in every step: what it calls is followed or noted
``followed_trace``    the noted calls under the recorder, and ``iteration_trace`` the iteration behind them
``recorder``          a dispatch mode below autograd that writes the graph; ``inputs``, ``packing``: its ends
``host_scalar``       numbers that are inputs; ``decisions``: for which of them a graph holds
``optimizer_swap``    torch's optimizers on fake tensors; ``loss_scaling``, ``bf16_updates``, ``newborn_state``
``batch``             leaves of batches; ``own_batch``: of each rank's own; ``symbolic_batch``: with open sizes
``once``              a step that is followed for its graph alone
"""
