"""Starting a run: the pure plan of what to launch, and the watch over it."""
