"""Environments: the only package that creates, steps and checks them.

Importing it does not import torch, so the command line starts fast.
"""

from rl_training.envs.checks import Finding, check_env, format_findings
from rl_training.envs.factory import EnvLike, make_env, make_vector_env
from rl_training.envs.wrappers import register_wrapper

__all__ = ["EnvLike", "Finding", "check_env", "format_findings", "make_env", "make_vector_env", "register_wrapper"]
