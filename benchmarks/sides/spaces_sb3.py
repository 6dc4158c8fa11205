"""One cell of the table of spaces, with Stable-Baselines3 (masks: sb3-contrib)."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from space_tasks import CELLS, SpaceEnv, length


def main(cell: str, share: int = 1) -> dict[str, float]:
    import torch
    from stable_baselines3 import DQN, PPO, SAC
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv

    torch.set_num_threads(1)
    algo, observation, action = CELLS[cell]
    steps, start = length(cell, share)
    policy = {"Dict": "MultiInputPolicy"}.get(observation, "CnnPolicy" if "image" in observation else "MlpPolicy")
    env = DummyVecEnv([lambda: SpaceEnv(observation, action)] * (8 if algo == "ppo" else 1))
    common: dict[str, Any] = {"seed": 0, "device": "cpu"}
    if algo == "ppo":
        common |= {"n_steps": 128, "n_epochs": 4, "batch_size": 256}
        cls: Any = PPO
        if action == "masked":
            from sb3_contrib import MaskablePPO

            cls = MaskablePPO
    elif algo == "dqn":
        common |= {
            "learning_starts": 100,
            "train_freq": 1,
            "gradient_steps": 1,
            "batch_size": 64,
            "buffer_size": 10_000,
        }
        cls = DQN
        if policy == "MlpPolicy":
            common["policy_kwargs"] = {"net_arch": [64, 64]}
    else:
        common |= {"learning_starts": 100, "batch_size": 256, "buffer_size": 10_000}
        cls = SAC

    class Watch(BaseCallback):
        began: tuple[float, float] | None = None

        def _on_step(self) -> bool:
            if self.num_timesteps >= start and self.began is None:
                self.began = (time.perf_counter(), time.process_time())
            return True

    watch = Watch()
    cls(policy, env, **common).learn(steps, callback=watch)
    assert watch.began is not None
    wall, cpu = time.perf_counter() - watch.began[0], time.process_time() - watch.began[1]
    return {"steps_per_second": (steps - start) / wall, "steps_per_cpu_second": (steps - start) / cpu}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
