"""One cell of the table of spaces, with this package."""

from __future__ import annotations

import json
import sys
import time

from space_tasks import CELLS, SpaceEnv, length


def main(cell: str, share: int = 1) -> dict[str, float]:
    import rl_training

    algo, observation, action = CELLS[cell]
    steps, start = length(cell, share)
    settings = {
        "ppo": {"num_envs": 8, "num_steps": 128, "num_epochs": 4, "minibatch_size": 256},
        "dqn": {"learning_starts": 100, "num_steps": 1, "updates_per_step": 1.0, "batch_size": 64},
        "sac": {"learning_starts": 100, "batch_size": 256},
    }[algo]
    if action == "masked":
        settings["action_masks"] = True
    if algo != "ppo":
        settings["buffer_size"] = 10_000
    cls = {"ppo": rl_training.PPO, "dqn": rl_training.DQN, "sac": rl_training.SAC}[algo]
    agent = cls(lambda: SpaceEnv(observation, action), seed=0, eval_every=0, num_threads=1, **settings)
    began: list[tuple[float, float]] = []

    def watch(run: object) -> None:
        if run.env_steps >= start and not began:  # type: ignore[attr-defined]
            began.append((time.perf_counter(), time.process_time()))

    agent.learn(steps, callback=watch, progress=False)
    wall, cpu = time.perf_counter() - began[0][0], time.process_time() - began[0][1]
    return {"steps_per_second": (steps - start) / wall, "steps_per_cpu_second": (steps - start) / cpu}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
