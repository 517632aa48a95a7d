"""What a run logs and says."""
