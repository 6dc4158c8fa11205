"""Callbacks: monitor a run and stop it early. Runs in a few seconds.

    python examples/callbacks.py

A callback gets a small view of the run (`RunView`): its counters, policy, metrics, and `stop(reason)`. It is called
after each iteration, that is after each rollout and its gradient steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rl_training import PPO, Callback, RunView


@dataclass
class PrintBest(Callback):
    """Prints each new best return. Dataclass fields are saved in checkpoints, so a resumed run restores `best`."""

    transient: ClassVar[tuple[str, ...]] = ("margin",)  # a setting, not saved as state
    margin: float = 10.0
    best: float = 0.0

    def on_start(self, run: RunView) -> None:
        print(f"training for at most {run.total_timesteps:,} steps")

    def on_iteration(self, run: RunView) -> None:
        mean = run.metrics().get("rollout/return_mean")  # over the last 100 episodes; absent before the first ends
        if mean is not None and mean > self.best + self.margin:
            self.best = mean
            print(f"{run.env_steps:6,} steps: return {mean:.1f}")

    def on_stop(self, run: RunView) -> None:
        print(f"stopped after {run.env_steps:,} steps and {run.updates:,} gradient steps")


def good_enough(run: RunView) -> bool:
    """A plain function is a callback too: it stops the run by returning False."""
    return run.metrics().get("rollout/return_mean", 0.0) < 50


def main() -> None:
    agent = PPO.from_preset("CartPole-v1", seed=1, eval_every=0)
    result = agent.learn(50_000, callback=[PrintBest(), good_enough], progress=False)
    print(f"why: {result.stop_reason}")
    # Evaluations can stop a run as well, without a callback: PPO.from_preset("CartPole-v1", stop_reward=475)
    print(f"evaluation: {agent.evaluate(num_episodes=10).mean:.1f}")
    agent.close()


if __name__ == "__main__":
    main()
