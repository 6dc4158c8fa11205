"""A fleet of workers in the collector's place: in this process, in processes of their own, or on a Ray cluster.

The result of a run depends on how many workers there are and on how many environments each has, never on where they
run. Only arrays and JSON travel between processes.
"""
