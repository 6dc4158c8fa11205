"""Stable-Baselines3 and sb3-contrib: `learn` over `make_vec_env` or `make_atari_env`, as their docs show it."""

from __future__ import annotations

from typing import Any

from clock import Clock, run
from tasks import Task


def arguments(task: Task) -> tuple[str, dict[str, Any]]:
    """Policy and keyword arguments of a model, from a task's settings."""
    own = dict(task.settings)
    kwargs: dict[str, Any] = {"learning_rate": own.pop("learning_rate"), "seed": 0}
    if "ppo" in task.algo:
        kwargs |= {
            "n_steps": own.pop("num_steps"),
            "n_epochs": own.pop("num_epochs"),
            "batch_size": own.pop("minibatch_size"),
            "ent_coef": own.pop("ent_coef"),
        }
    else:
        kwargs |= {name: own.pop(name) for name in ("batch_size", "buffer_size", "learning_starts")}
    if task.algo == "dqn":
        every = own.pop("num_steps")
        kwargs["train_freq"] = every
        kwargs["gradient_steps"] = round(own.pop("updates_per_step") * every)
        kwargs["target_update_interval"] = own.pop("target_update_every") * every
    if "tau" in own:
        kwargs |= {"tau": own.pop("tau"), "train_freq": 1, "gradient_steps": 1}
    assert not own, f"no translation for {own}"
    if task.atari:
        return "CnnPolicy", kwargs
    kwargs["policy_kwargs"] = {"net_arch": list(task.sizes)}
    return ("MlpLstmPolicy" if task.algo == "recurrent_ppo" else "MlpPolicy"), kwargs


def side(task: Task, threads: int, clock: Clock) -> None:
    import sb3_contrib
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    clock.mark("imported")
    if threads:
        torch.set_num_threads(threads)

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps > task.start:
                clock.mark("start")
            return True

    if task.atari:
        import ale_py
        import gymnasium

        gymnasium.register_envs(ale_py)
        # gymnasium's own id for the game without frame skip, which SB3's wrapper brings
        env: Any = make_atari_env("PongNoFrameskip-v4", n_envs=task.num_envs, seed=0)
        env = VecFrameStack(env, n_stack=4)
    else:
        env = make_vec_env(task.env_id, n_envs=task.num_envs, seed=0)
    classes = {
        "ppo": stable_baselines3.PPO,
        "dqn": stable_baselines3.DQN,
        "sac": stable_baselines3.SAC,
        "td3": stable_baselines3.TD3,
        "recurrent_ppo": sb3_contrib.RecurrentPPO,
    }
    policy, kwargs = arguments(task)
    classes[task.algo](policy, env, device="cpu", **kwargs).learn(task.steps, callback=Watch())


if __name__ == "__main__":
    run(side, ("stable-baselines3", "sb3-contrib", "torch", "gymnasium", "numpy"))
