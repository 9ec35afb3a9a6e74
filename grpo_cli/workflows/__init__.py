"""What each command does, without printing. The only floor that combines the rooms below it.

A workflow reports through a `Reporter`; the command line's prints, and `Reporter` itself is silent.
"""
