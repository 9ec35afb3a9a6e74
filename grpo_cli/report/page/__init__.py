"""One HTML page of runs: what stands on it, part by part, and the files it is put together from."""
