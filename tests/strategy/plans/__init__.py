"""Plans and options that change the graph: shards, chunks, rematerialization, regions."""
