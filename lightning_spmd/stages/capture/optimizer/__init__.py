"""Gradients and the optimizer's step in the captured graph.

``own_backward``    functions with a backward of their own; ``accumulation``: gradients as ``p.grad`` has them
``optimizer_swap``  the optimizer on fake tensors and recorded numbers; ``newborn_state``: what its first step creates
``loss_scaling``    the GradScaler; ``skipped_step``: a step taken back; ``bf16_updates``: in float32
"""
