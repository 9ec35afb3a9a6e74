"""What the model acts in: tools, environments, and the loop of an episode's turns.

Owns their kinds, what each must implement, and the tokens of an episode. Sampling is `fast`'s, scoring is
`rewards`'; nothing here knows a trainer or a run folder.
"""
