"""A plan as one HTML file that needs nothing else: no network, no library; pictures are SVG, made here."""

from lightning_spmd.planning.page.page import page_of

__all__ = ["page_of"]
