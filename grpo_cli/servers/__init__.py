"""vLLM's server as a process of ours: its command, its ports, its life. Knows neither runs nor trainings."""
