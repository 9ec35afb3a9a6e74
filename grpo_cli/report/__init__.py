"""Reading run folders for people: live progress and the summary at the end. Files only, no torch."""
