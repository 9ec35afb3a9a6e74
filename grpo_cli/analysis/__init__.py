"""Numbers about runs: metrics with intervals, paired comparisons, diagnosis rules and expected bands."""
