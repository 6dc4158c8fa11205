"""A conformance check for environments; findings say what is wrong, how it affects training, and how to fix it.

    >>> print(format_findings(check_env("CartPole-v1")))  # doctest: +ELLIPSIS
    No problems found...

The check takes random actions, so it finds only what random actions can reach. Levels:

- `error`: training would fail or learn from wrong data;
- `warning`: training works, but something is probably not what was meant;
- `info`: good to know.

To be saved in the middle of an episode, an environment implements `get_state()`, which returns plain data, and
`set_state(state)`, which restores it (see `rl_training.envs.snapshot`). The state must contain everything the next
steps depend on, including the random generator.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import gymnasium as gym
from gymnasium.vector import VectorEnv

from rl_training.envs.checks.findings import CannotGoOn, Finding, Report, error_text, format_findings
from rl_training.envs.checks.single import check_single
from rl_training.envs.checks.vector import check_vector
from rl_training.envs.factory import EnvLike, SingleEnv, make_env
from rl_training.envs.vector import AnyVectorEnv

__all__ = ["Finding", "check_env", "format_findings"]


def check_env(env: EnvLike, *, num_steps: int = 2000, seed: int = 0) -> list[Finding]:
    """Check an environment; problems are reported, not raised.

    An environment object is stepped and left open: reset it before you use it. An environment that is created here
    (from an id or a callable) is closed here.

    Args:
        env: An id, a callable that returns an environment, an environment, or a vector environment.
        num_steps: How many random steps to take.
        seed: Seed of the environment and of the random actions.

    Returns:
        Findings, errors first; only `info` findings if nothing is wrong.

    Example:
        >>> [finding for finding in check_env("CartPole-v1") if finding.level != "info"]
        []
    """
    report = Report()
    with warnings.catch_warnings():
        # Gymnasium's passive checker warns of some of the same things; here they are findings
        warnings.filterwarnings("ignore", message=r"(\x1b\[\d+m)?WARN:")
        try:
            with _opened(env, report) as target:
                if isinstance(target, VectorEnv):
                    check_vector(target, report, num_steps, seed)
                else:
                    check_single(target, report, num_steps, seed)
        except CannotGoOn:
            pass
        except (Exception, SystemExit) as error:  # an environment so unusual that a check itself failed
            report.add("error", "check", f"the check could not be finished: {error_text(error)}")
    return report.findings()


@contextmanager
def _opened(env: EnvLike, report: Report) -> Iterator[SingleEnv | AnyVectorEnv]:
    """The given environment, or one created from an id or a callable, which is closed afterwards."""
    if isinstance(env, (gym.Env, VectorEnv)):
        yield env
        return
    try:
        # our own checks say more than the passive checker, and its assertions would come first
        made = make_env(env, {"disable_env_checker": True}) if isinstance(env, str) else env()
    except (Exception, SystemExit) as error:
        raise report.fatal("making", f"the environment could not be made: {error_text(error)}") from error
    if not isinstance(made, (gym.Env, VectorEnv)):
        raise report.fatal(
            "making",
            f"got a {type(made).__module__}.{type(made).__qualname__}, which is not a gymnasium.Env. Derive the class "
            "from gymnasium.Env (environments of the old `gym` package must be ported or wrapped for compatibility)",
        )
    try:
        yield made
    finally:
        try:
            made.close()
        except (Exception, SystemExit) as error:
            report.add("error", "closing", f"close() raised {error_text(error)}")
