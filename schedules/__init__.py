"""How work is divided: targets, workloads, schedules, their rules and cost, and the choice among
them. Pure Python."""
