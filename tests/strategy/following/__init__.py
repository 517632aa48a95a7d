"""Steps that are followed: what their Python may do."""
