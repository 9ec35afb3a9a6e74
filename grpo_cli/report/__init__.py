"""Reading run folders for people: summaries, lists, comparisons. Files only, no torch.

`live/` shows a run while it goes on, `page/` puts it on an HTML page.
"""
