"""The command line, the demo and what they print."""
