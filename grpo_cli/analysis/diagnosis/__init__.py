"""Why a run does not learn, read from its own metrics: named rules with sources, and what mends it. No torch."""
