"""Faults on real processes: what happens to a training that is killed, told to stop, lied to or starved.

``python -m tests.reliability`` repeats every one and measures what came of it; ``docs/reliability.md`` is what it
writes. (``tests/faults`` are faults in the source, planted to see whether the tests notice.)

* ``ranks``: processes that are forked from one that has imported everything, and end like any process;
* ``job``: the training that they run;
* ``fault``: what a fault is, and what is asked of its end;
* ``killed``, ``stopped``, ``saving``, ``loading``, ``unlike``, ``numbers``, ``sharing``: the faults;
* ``account``: from ended processes to a row; ``table``: from rows to the document.
"""
