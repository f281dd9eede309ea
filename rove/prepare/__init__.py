"""From text to a folder of shards: sources, units of work, processes, writers, checks."""
