"""A step whose Python ran, its optimizer and its batch → CapturedStep: one graph, global shapes, typed signature.

``follow/``           the user's Python in every step: its calls are followed or noted
``followed_trace``    runs the noted calls and the rest of the iteration under the recorder; ``followed_by_hand``:
                      manual optimization; ``pieces``: the beginning of a step, from read to read
``record/``           the recorder, and inputs and outputs of the graph that it writes
``numbers/``          Python numbers that are inputs, and branches on them
``optimizer/``        gradients, the optimizer's step, loss scaling, updates of bfloat16
``batch/``            leaves of batches; ``sizes/``: sizes that a graph leaves open
``rewrites/``         the first rewrites of the captured graph
``request``           a request to capture a step; ``once``: a step that is followed for its graph alone
``user_code``         whether a frame is the user's code
"""
