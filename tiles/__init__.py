"""What is computed: tile programs, and the way from a program to a kernel directory (compile, lint,
cache)."""
