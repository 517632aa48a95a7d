"""Measurements of trainings side by side, and the tables made of them.

``measure``          trains under several strategies in turn; ``sides``: the strategies; ``peak_memory``
``compare_table``    the table of ``lightning-spmd compare``
``pass_docs``        the table in ``docs/passes.md``
"""
