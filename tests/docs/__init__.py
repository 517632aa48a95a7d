"""Every block of code in ``README.md`` and ``docs/*.md`` is run, and every link is followed.

A block between fences names its language; indented code is refused unless the page says
``<!-- indented blocks: reason -->``. Without a comment:

* ``python`` is run behind the page's other Python blocks, in one namespace and one empty folder. A Trainer has one CPU
  and, where the block names no ``max_epochs``, one epoch.
* ``bash``: each command is looked at. ``lightning-spmd`` makes everything up to the training, the options of
  ``python -m`` and ``torchrun`` are parsed; files, modules, extras and ``.ci/`` commands exist. So are commands and
  paths in running text.
* ``yaml`` is a recipe, which the command's parser reads.
* ``text`` is not looked at: diagrams and dumps.

A comment in the line above the fence, which GitHub does not show, changes that. Options are combined:
``<!-- run: devices=2 batches=4 file=train.py -->``.

* ``<!-- run: devices=1 -->``: every Trainer gets so many devices, whatever the block says; with ``devices=2`` the block
  is run in two processes that form a group, like ``torchrun``'s; ``devices=1,2``: both, for definitions that later
  blocks need in either.
* ``<!-- run: batches=4 -->``: epochs end after so many batches.
* ``<!-- run: given=MyModule,MyData -->``: names that a reader would have, from ``tests/docs/given.py``; ``my_project``
  is a module to import.
* ``<!-- run: file=train.py -->``: the block is that file of the page's folder, and is run as a script; also for
  ``yaml``.
* ``<!-- run: inside=fit strategy=spmd_zero3 -->``: it is run in a hook at the end of a training's epoch, with
  ``trainer``, ``model``, ``dataset`` and ``prompt``.
* ``<!-- run: raises=CaptureError -->``: it ends with that error.
* ``<!-- run: under=trainer recipe=recipes/gpt_bytes.yaml -->``: ``yaml`` that stands there in a recipe, on top of that
  recipe.
* ``<!-- run: kind=hardware -->``: ``yaml`` for ``plan --hardware``.
* ``<!-- output -->``: ``text`` that the Python block before it printed, or the error it ended with; numbers may differ
  by 1 %.
* ``<!-- message -->``: ``text`` with a message of the package a line, ``...`` for names and numbers: it must be in the
  source.
* ``<!-- not run: reason -->``: what no test can run, with the reason in words.
"""
