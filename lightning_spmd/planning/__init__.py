"""``lightning-spmd plan``: predicts a training before it runs.

::

    capturing.py    recipe → the captured graphs of one iteration, on tensors without memory
    layout.py       captured graph + layout → the graphs that a rank of so many would run
    streams.py      graphs + times → what computes and what communicates when
    contents.py     graphs → what lies in memory
    outlook.py      all of it in one: ``Outlook``, which is what is printed, drawn and written
    tables.py, page.py, chrome_trace.py     Outlook → terminal, HTML, trace
    search.py       layouts, ranked

Nothing is measured here and nothing runs on a device: times come from ``cost/hardware.py`` and ``cost/operators.py``.
"""
