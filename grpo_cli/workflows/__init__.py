"""What a command does, without printing: the only floor that combines the rooms below."""
