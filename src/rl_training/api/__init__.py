"""The outside of the package: one object with five verbs, and functions that do the same from files."""
