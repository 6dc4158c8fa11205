"""Pages, plots and tables about runs and benchmarks."""
