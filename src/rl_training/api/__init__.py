"""The public API: the `Agent` class with its methods, and functions that do the same from files."""
