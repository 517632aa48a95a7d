"""Lightning's side: hooks in, hooks out; no graph code."""
