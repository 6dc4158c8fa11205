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

    n_step: int = setting(3, "Rewards that are summed before the bootstrap.", ge=1, search=choices(1, 3, 5, 10))
    prioritized: bool = setting(True, "Sample transitions in proportion to their last error.")
    priority_exponent: float = setting(
        0.5, "How much priorities matter: 0 is uniform, 1 proportional.", ge=0, search=uniform(0.2, 0.8)
    )
    epsilon: ScheduleOrFloat = setting(
        0.0, "Probability of a random action when exploring, a number or a schedule.", ge=0, le=1
    )
    double: bool = setting(True, "The online network chooses the next action, the target network judges it.")
    dueling: bool = setting(True, "Part action values into a state's value and the actions' advantages.")
    noisy: bool = setting(True, "Explore by learned noise on the weights (an epsilon of 0 then leaves it to them).")


class RainbowAlgorithm(C51Algorithm):
    """The C51 algorithm with other defaults."""


SPEC = AlgorithmSpec(
    name="rainbow",
    title="Rainbow",
    config=RainbowConfig,
    algorithm=RainbowAlgorithm,
    regimes=(Regime.OFF_POLICY,),
    action_spaces=(spaces.Discrete,),
    paper="Hessel et al. 2018, Rainbow: Combining Improvements in Deep Reinforcement Learning, arXiv:1710.02298",
)
