"""The worker: builds TRL's trainer from a run folder and trains. The only room that is all torch."""
