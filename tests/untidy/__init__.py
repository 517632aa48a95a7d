"""Steps as users write them, with state anywhere in Python: every one must train as if there were no graph.

::

    untidy.py        what all cases share: a net of two layers, its data, what a case says of itself
    objects.py … by_hand.py
                     the cases, by kind of thing
    cases.py         all of them, by name
    running.py       one case under one strategy -> Outcome; how two of them differ
    __main__.py      ``python -m tests.untidy``: the table
    test_untidy.py   the same as tests
    not_yet.py       the cases that differ today
"""
