"""Files kept between runs: bytes by content, sealed, in a folder of the user's own."""

from lightning_spmd.cache.store import Counts, Store, the_store

__all__ = ["Counts", "Store", "the_store"]
