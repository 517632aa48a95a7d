"""``lightning-spmd plan``: predicts a training before it runs.

::

    capturing.py    recipe → the captured graphs of one iteration, on tensors without memory
    layout.py       captured graph + layout → the graphs of one rank
    streams.py      graphs + times → when the rank computes and communicates
    contents.py     graphs → the contents of memory
    outlook.py      all results in one ``Outlook``
    facts.py        Outlook → plain data; tables.py, page/, chrome_trace.py: terminal, HTML, trace
    search.py       layouts, ranked; estimate.py: a rough cost, to order them before they are built

Nothing is measured and nothing runs on a device: times (``times.py``) come from ``cost/hardware.py``,
``cost/operators.py`` and the user's ``hardware_file.py``. Three files are about this machine: ``calibration.py``
measures the speed of its CPU, ``kernels.py`` the convolutions of a graph, and ``timed.py`` has the streams of a run as
they were measured.
"""
