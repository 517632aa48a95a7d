"""The local graph that is being written.

``fakes``           results of its calls on fake tensors, or remembered ones
``local_program``   the graph; each of its calls is made on fake tensors first
``memory_order``    operators that depend on the memory order of their operands
``storage``         what ``as_strided`` reads
"""
