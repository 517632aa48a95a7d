"""Final graphs as CUDA graphs.

``recordable``         which nodes can be recorded, and where the graph is cut
``recorded_pieces``    runs the pieces: recordings, and gaps as Python
``cuda_graphs``        records a graph's pieces, and launches them
"""
