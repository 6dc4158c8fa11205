"""Public module for run directories."""

from rl_training.experiment.runs import make_run_dir

__all__ = ["make_run_dir"]
