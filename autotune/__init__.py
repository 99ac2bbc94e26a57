"""How schedules get good: candidates are ranked, compiled, verified, measured in an isolated
worker, and recorded."""
