"""``lightning-spmd plan``: predicts a training before it runs.

::

    capturing.py    recipe → the captured graphs of one iteration, on tensors without memory
    layout.py       captured graph + layout → the graphs of one rank
    streams.py      graphs + times → when the rank computes and communicates
    contents.py     graphs → the contents of memory
    outlook.py      all results in one ``Outlook``
    tables.py, page.py, chrome_trace.py     Outlook → terminal, HTML, trace
    search.py       layouts, ranked

Nothing is measured and nothing runs on a device: times come from ``cost/hardware.py`` and ``cost/operators.py``.
"""
