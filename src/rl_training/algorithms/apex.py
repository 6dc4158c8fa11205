"""Ape-X DQN: many environments that explore at different rates, one prioritised replay (Horgan et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gymnasium import spaces

from rl_training.algorithms.dqn import DQNAlgorithm, DQNConfig
from rl_training.contracts.arrays import FloatArray
from rl_training.contracts.schedule import Schedule, ScheduleOrFloat, value_of
from rl_training.contracts.settings import choices, documented, setting, uniform
from rl_training.contracts.spec import AlgorithmSpec, Regime


@documented
@dataclass
class ApeXConfig(DQNConfig):
    """Settings of Ape-X DQN: those of DQN, with the paper's extensions on."""

    epsilon: ScheduleOrFloat = setting(
        0.4,
        "Exploration rate of the environment that explores most; the others' are powers of it (epsilon_power).",
        ge=0,
        le=1,
        search=uniform(0.2, 0.8),
    )
    epsilon_power: float = setting(
        7.0, "Exploration rates go from epsilon to epsilon ** (1 + this), environment by environment.", ge=0
    )
    double: bool = setting(
        True, "Double Q-learning: the online network chooses the next action, the target network evaluates it."
    )
    dueling: bool = setting(True, "Dueling network: state value plus advantages of the actions.")
    n_step: int = setting(3, "Rewards summed before bootstrapping (n-step returns).", ge=1, search=choices(1, 3, 5))
    prioritized: bool = setting(True, "Prioritised replay: sample transitions in proportion to their last TD error.")
    importance_exponent: ScheduleOrFloat = setting(
        0.4, "Importance-sampling exponent, a number or a schedule; 1 corrects the bias fully.", ge=0
    )

    def problems(self) -> list[str]:
        """See `AlgorithmConfig.problems`."""
        wrong = isinstance(self.epsilon, Schedule)
        return super().problems() + (["epsilon: must be a number, because it spreads over environments"] * wrong)


def epsilon_ladder(epsilon: float, power: float, count: int) -> FloatArray:
    """Exploration rates [N], epsilon ** (1 + power * i / (N - 1)): from epsilon down; epsilon itself if N is 1.

    Example:
        >>> epsilon_ladder(0.5, 2.0, 3).tolist()
        [0.5, 0.25, 0.125]
    """
    rungs: FloatArray = epsilon ** (1.0 + power * np.arange(count) / max(1, count - 1))
    return rungs


class ApeXAlgorithm(DQNAlgorithm):
    """DQN whose environments explore at rates of their own."""

    config: ApeXConfig

    def place(self, first: int, count: int, total: int) -> None:
        """See `Algorithm.place`: takes the exploration rates of these environments from the ladder."""
        ladder = epsilon_ladder(value_of(self.config.epsilon, 0.0), self.config.epsilon_power, total)
        self.policy.rates = ladder[first : first + count]


SPEC = AlgorithmSpec(
    name="apex",
    title="ApeX",
    config=ApeXConfig,
    algorithm=ApeXAlgorithm,
    regimes=(Regime.OFF_POLICY,),
    action_spaces=(spaces.Discrete,),
    paper="Horgan et al. 2018, Distributed Prioritized Experience Replay, arXiv:1803.00933",
    default_num_envs=8,
)
