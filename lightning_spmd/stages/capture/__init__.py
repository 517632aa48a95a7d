"""A step whose Python ran, its optimizer and its batch → CapturedStep: one graph, global shapes, typed signature.

``follow/``           the user's Python in every step: what it calls is followed or noted
``followed_trace``    the noted calls under the recorder; ``followed_by_hand``: of manual optimization
``iteration_trace``   the iteration behind them: backward pass, clipping, optimizer
``record/``           the recorder and the ends of the graph that it writes
``numbers/``          Python numbers that are inputs, and branches on them
``optimizer/``        gradients, the optimizer's step, loss scaling, updates of bfloat16
``batch/``            leaves of batches; ``sizes/``: sizes that are open
``rewrites/``         what is done to the captured graph at once
``request``           what is asked of capture; ``once``: a step that is followed for its graph alone
``user_code``         whose code a frame is
"""
