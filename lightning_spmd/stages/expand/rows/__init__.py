"""Rows whose number or order depends on values. Each rank works on its own, and no rank gets another's.

``routing``    rows sorted, worked on and put back (mixture of experts)
``chosen``     rows that values choose (``x[mask]``)
"""
