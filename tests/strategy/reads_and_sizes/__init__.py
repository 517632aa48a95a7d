"""Values that Python reads, and sizes that follow from them or from batches."""
