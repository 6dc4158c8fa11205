"""The zoo: presets, benchmark suites, results and trained agents."""
