"""What people read: generated tables."""
