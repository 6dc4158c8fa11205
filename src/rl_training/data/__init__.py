"""Storage that keeps time, ways to sample it, and running statistics."""
