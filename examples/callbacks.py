"""Look into a run while it goes on, and end it early. Runs in a few seconds.

    python examples/callbacks.py

A callback sees a small view of the run (`RunView`): its counters, its policy, its metrics, and `stop(reason)`. It is
called after each iteration, that is after each rollout and the learning from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rl_training import PPO, Callback, RunView


@dataclass
class PrintBest(Callback):
    """Prints each new best return. Fields of a dataclass are saved with the run, so a resumed run knows its best."""

    transient: ClassVar[tuple[str, ...]] = ("margin",)  # a setting, not state
    margin: float = 10.0
    best: float = 0.0

    def on_start(self, run: RunView) -> None:
        print(f"training for at most {run.total_timesteps:,} steps")

    def on_iteration(self, run: RunView) -> None:
        mean = run.metrics().get("rollout/return_mean")  # over the last 100 episodes; absent before the first one ends
        if mean is not None and mean > self.best + self.margin:
            self.best = mean
            print(f"{run.env_steps:6,} steps: return {mean:.1f}")

    def on_stop(self, run: RunView) -> None:
        print(f"stopped after {run.env_steps:,} steps and {run.updates:,} gradient steps")


def good_enough(run: RunView) -> bool:
    """A plain function is a callback too: returning False ends the run."""
    return run.metrics().get("rollout/return_mean", 0.0) < 50


def main() -> None:
    agent = PPO.from_preset("CartPole-v1", seed=1, eval_every=0)
    result = agent.learn(50_000, callback=[PrintBest(), good_enough], progress=False)
    print(f"why: {result.stop_reason}")
    # Evaluations can end a run as well, without any code: PPO.from_preset("CartPole-v1", stop_reward=475)
    print(f"evaluation: {agent.evaluate(num_episodes=10).mean:.1f}")
    agent.close()


if __name__ == "__main__":
    main()
