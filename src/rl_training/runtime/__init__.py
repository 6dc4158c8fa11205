"""Data collection, training loops and evaluation, independent of any particular algorithm."""
