"""Algorithms with extra state or edge cases: the lifecycle of the core algorithms, with a weaker stability promise."""
