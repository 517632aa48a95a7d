"""The user's hooks, and work moved across iterations."""
