"""Run folders: their layout, status, manifest and metrics. Plain files, no torch."""
