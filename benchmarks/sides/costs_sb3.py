"""Stable-Baselines3: saving and loading models with their replay buffer, and the memory that the buffer allocates."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from costs import REPEATS, TRANSITIONS, measure_checkpoints, report

PACKAGES = ("stable-baselines3", "torch", "gymnasium", "numpy")


def ppo() -> dict[str, Any]:
    """A model trained on one rollout."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    env = make_vec_env("CartPole-v1", n_envs=8)
    model = PPO("MlpPolicy", env, n_steps=128, batch_size=64, device="cpu", seed=0)
    model.learn(1_024)
    return checkpoints(model, lambda path: PPO.load(path / "model", env=env, device="cpu"), lambda path: None)


def sac() -> dict[str, Any]:
    """A model with a full replay buffer. Its content does not affect the time, so it is written directly."""
    import numpy as np
    from stable_baselines3 import SAC
    from stable_baselines3.common.env_util import make_vec_env

    env = make_vec_env("HalfCheetah-v5")
    model = SAC("MlpPolicy", env, buffer_size=TRANSITIONS, device="cpu", seed=0)
    model.learn(10)
    buffer, rng = model.replay_buffer, np.random.default_rng(0)
    for name in ("observations", "next_observations", "actions", "rewards"):
        column = getattr(buffer, name)
        column[:] = rng.standard_normal(column.shape)
    buffer.full = True

    def load(path: Path) -> Any:
        loaded = SAC.load(path / "model", env=env, device="cpu")
        loaded.load_replay_buffer(path / "replay")
        assert loaded.replay_buffer.size() == TRANSITIONS
        return loaded

    return checkpoints(model, load, lambda path: model.save_replay_buffer(path / "replay"))


def checkpoints(model: Any, load: Any, save_replay: Any) -> dict[str, Any]:
    """Save to a new directory each time, and load."""

    def save(path: Path) -> None:
        path.mkdir()
        model.save(path / "model")
        save_replay(path)

    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / str(number) for number in range(REPEATS)]
        return measure_checkpoints([partial(save, path) for path in paths], partial(load, paths[-1]), paths[-1])


def columns(buffer: Any) -> int:
    """Bytes of a buffer's arrays."""
    import numpy as np

    return sum(value.nbytes for value in vars(buffer).values() if isinstance(value, np.ndarray))


def halfcheetah() -> dict[str, Any]:
    """A replay buffer of a million transitions. Its arrays are not written to, so this is the allocated size."""
    import gymnasium
    from stable_baselines3.common.buffers import ReplayBuffer

    env = gymnasium.make("HalfCheetah-v5")
    buffer = ReplayBuffer(1_000_000, env.observation_space, env.action_space, device="cpu")
    return {"transitions": 1_000_000, "bytes": columns(buffer)}


def atari() -> dict[str, Any]:
    """The same for 100 000 transitions of Atari frames, plain and with `optimize_memory_usage`."""
    import gymnasium
    import numpy as np
    from stable_baselines3.common.buffers import ReplayBuffer

    space, actions = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8), gymnasium.spaces.Discrete(6)
    plain = columns(ReplayBuffer(TRANSITIONS, space, actions, device="cpu"))
    lean = ReplayBuffer(
        TRANSITIONS, space, actions, device="cpu", optimize_memory_usage=True, handle_timeout_termination=False
    )
    return {"transitions": TRANSITIONS, "bytes": plain, "optimized_bytes": columns(lean)}


if __name__ == "__main__":
    report({"ppo": ppo, "sac": sac, "halfcheetah": halfcheetah, "atari": atari}, PACKAGES)
