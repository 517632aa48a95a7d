"""Parameters, optimizer state and random state of a run.

``state_layout``      parts, wholes and both; ``memory``: layouts in memory; ``wide_state``: float32 beside bfloat16
``layer_sharing``     which layers the ranks of the tensor axis share, which experts those of the data axis
``new_parameters``    tensors that come later; ``replaced_tensors``: replaced ones
``random_state``      random numbers at the start and in checkpoints; ``kept_generators``: a module's own
"""
