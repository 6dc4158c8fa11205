"""Algorithms with extra state or edge cases: the same lifecycle as core, a weaker promise of stability."""
