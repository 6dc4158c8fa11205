"""Checks for third-party code: `check_algorithm` for an algorithm, `check_env` for an environment.

>>> from rl_training.testing import check_algorithm
>>> check_algorithm(my_package.SPEC)  # doctest: +SKIP
"""

from rl_training.envs.checks import check_env, format_findings
from rl_training.testing.algorithms import check_algorithm

__all__ = ["check_algorithm", "check_env", "format_findings"]
