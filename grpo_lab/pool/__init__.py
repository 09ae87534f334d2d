"""Makes pools: sampled by a run's initial model or a checkpoint, or imported from a file. Read by `offline/`."""
