"""Operators of graphs that torch does not have, or whose shapes it does not know.

``library``           how they are told to torch
``packed_rnn``        recurrent layers over packed sequences; ``packed_sums`` adds their gradients as autograd does
``onednn_lstm``       the LSTM of oneDNN, which torch calls on hosts
``ctc``               CTC over padded targets, with results as large as these and not as the lengths
``positions``         what ``nonzero`` gives, in its memory layout
``host_copies``       activations that wait in the host's memory
``generator_state``   torch's generator, read, seeded and set within a step
``shape_functions``   shapes and memory of results where torch's own functions disagree with its kernels
"""
