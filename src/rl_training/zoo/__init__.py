"""The zoo: presets, benchmark suites, results and trained agents. It is no second runtime."""
