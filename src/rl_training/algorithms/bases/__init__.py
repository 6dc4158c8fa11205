"""Base classes of families of algorithms. The algorithms themselves are the modules of the parent package."""
