"""Rainbow: DQN with six improvements combined, based on C51 (Hessel et al. 2018, arXiv:1710.02298)."""

from __future__ import annotations

from dataclasses import dataclass

from gymnasium import spaces

from rl_training.algorithms.c51 import C51Algorithm, C51Config
from rl_training.contracts.schedule import ScheduleOrFloat
from rl_training.contracts.settings import choices, documented, setting, uniform
from rl_training.contracts.spec import AlgorithmSpec, Regime


@documented
@dataclass
class RainbowConfig(C51Config):
    """Settings of Rainbow: those of C51, with all improvements enabled and the paper's values for them."""

    n_step: int = setting(
        3, "Rewards summed before bootstrapping (n-step returns).", ge=1, le=10_000, search=choices(1, 3, 5, 10)
    )
    prioritized: bool = setting(True, "Prioritised replay: sample transitions in proportion to their last TD error.")
    priority_exponent: float = setting(
        0.5, "Priority exponent: 0 is uniform sampling, 1 is proportional to the error.", ge=0, search=uniform(0.2, 0.8)
    )
    epsilon: ScheduleOrFloat = setting(
        0.0, "Exploration rate: probability of a random action, a number or a schedule.", ge=0, le=1
    )
    double: bool = setting(
        True, "Double Q-learning: the online network chooses the next action, the target network evaluates it."
    )
    dueling: bool = setting(True, "Dueling network: state value plus advantages of the actions.")
    noisy: bool = setting(
        True, "Noisy networks: explore with learned noise on the weights (use an epsilon of 0 with it)."
    )


class RainbowAlgorithm(C51Algorithm):
    """The C51 algorithm with other defaults."""


SPEC = AlgorithmSpec(
    name="rainbow",
    title="Rainbow",
    config=RainbowConfig,
    algorithm=RainbowAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Discrete,),
    paper="Hessel et al. 2018, Rainbow: Combining Improvements in Deep Reinforcement Learning, arXiv:1710.02298",
)
