"""What the stages exchange: signatures, placements, node facts, captured and sharded steps, guards, verification.

Nothing here knows Lightning. Import order inside:
``placement < node_info < signature < guards < steps < aliasing < verify, printer``; ``tree`` stands alone. Operators
that torch does not have are in ``operators``.
"""
