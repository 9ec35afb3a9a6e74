"""What completions are worth: scored, summed up, compared."""
