"""Rules: which schedules a program accepts on a target, and which of them are worth trying."""
