"""Stable-Baselines3 and sb3-contrib: `learn` with `make_vec_env` or `make_atari_env`, as in their docs."""

from __future__ import annotations

from typing import Any

from clock import Clock, run
from tasks import Task

SAME = {
    "learning_rate": "learning_rate",
    "gamma": "gamma",
    "gae_lambda": "gae_lambda",
    "clip_coef": "clip_range",
    "clip_value_coef": "clip_range_vf",
    "ent_coef": "ent_coef",
    "normalize_advantage": "normalize_advantage",
    "target_kl": "target_kl",
    "max_grad_norm": "max_grad_norm",
    "num_epochs": "n_epochs",
    "minibatch_size": "batch_size",
    "batch_size": "batch_size",
    "buffer_size": "buffer_size",
    "learning_starts": "learning_starts",
    "tau": "tau",
    "target_noise": "target_policy_noise",
    "target_noise_clip": "target_noise_clip",
}
"""Settings that differ only in name."""
FIXED = {"double": False, "loss": "huber", "initial_temperature": 1.0, "sequence_length": None}
"""Settings of this package that are fixed there, with their values."""


def arguments(task: Task, activations: dict[str, Any], left_out: tuple[str, ...] = ()) -> tuple[str, dict[str, Any]]:
    """Policy and keyword arguments of a model. `left_out` are arguments that the model does not support."""
    own = dict(task.settings)
    for name, value in FIXED.items():
        assert own.pop(name, value) == value, f"{name} cannot be set"
    optimizer, memory, noise = own.pop("optimizer"), own.pop("memory", None), own.pop("noise", {"kind": "none"})
    assert optimizer["name"] == "adam"
    policy: dict[str, Any] = {"optimizer_kwargs": {"eps": optimizer["eps"]}}
    kwargs: dict[str, Any] = {"seed": 0}
    num_steps = own.pop("num_steps")
    if "ppo" in task.algo:
        kwargs |= {"n_steps": num_steps, "vf_coef": own.pop("vf_coef") / 2}  # their loss is the full squared error
    else:
        kwargs |= {"train_freq": num_steps, "gradient_steps": round(own.pop("updates_per_step") * num_steps)}
    if task.algo == "dqn":
        epsilon = own.pop("epsilon")
        kwargs |= {
            "exploration_initial_eps": epsilon["start"],
            "exploration_final_eps": epsilon["end"],
            "exploration_fraction": epsilon["until"],
            "target_update_interval": round(own.pop("target_update_every") * num_steps / kwargs["gradient_steps"]),
        }
    if task.algo in ("sac", "td3", "tqc", "crossq"):
        assert own.pop("max_grad_norm") is None, "gradients are not clipped there"
        policy["n_critics"] = own.pop("num_critics")
    if task.algo in ("sac", "tqc", "crossq"):
        assert own.pop("temperature") is None
        kwargs |= {"ent_coef": "auto", "target_entropy": own.pop("target_entropy") or "auto"}
    if task.algo in ("sac", "tqc"):
        assert own.pop("policy_delay") == 1, "the actor learns in every step there"
    elif task.algo in ("td3", "crossq"):
        kwargs["policy_delay"] = own.pop("policy_delay")
    if task.algo == "tqc":
        kwargs["top_quantiles_to_drop_per_net"] = own.pop("num_dropped")
        policy["n_quantiles"] = own.pop("num_quantiles")
    if noise["kind"] == "gaussian":
        kwargs["action_noise"] = gaussian(task.env_id, noise["std"])
    if memory is not None:
        assert memory["kind"] == "lstm"
        assert memory["critic"] == "separate"
        policy |= {"lstm_hidden_size": memory["size"], "n_lstm_layers": 1, "enable_critic_lstm": True}
    kwargs |= {SAME[name]: value for name, value in own.items()}
    for name in left_out:
        kwargs.pop(name, None)
    if task.atari:
        return "CnnPolicy", {**kwargs, "policy_kwargs": {**policy, "net_arch": []}}
    policy |= {"net_arch": list(task.sizes), "activation_fn": activations[task.activation]}
    kwargs["policy_kwargs"] = policy
    return ("MlpLstmPolicy" if task.algo == "recurrent_ppo" else "MlpPolicy"), kwargs


def gaussian(env_id: str, std: float) -> Any:
    """Action noise, which these packages leave to the user."""
    import gymnasium
    import numpy as np
    from stable_baselines3.common.noise import NormalActionNoise

    env = gymnasium.make(env_id)
    shape = env.action_space.shape
    env.close()
    return NormalActionNoise(np.zeros(shape), np.full(shape, std))


def watcher(task: Task, clock: Clock) -> Any:
    """A callback that marks the start: the first step after the task's `start`, and so after its update."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps > task.start:
                clock.mark("start")
            return True

    return Watch()


def side(task: Task, threads: int, clock: Clock) -> None:
    import sb3_contrib
    import stable_baselines3
    import torch
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    clock.mark("imported")
    if threads:
        torch.set_num_threads(threads)
    clock.await_first_step(task.env_id)
    if task.atari:
        import ale_py
        import gymnasium

        gymnasium.register_envs(ale_py)
        # gymnasium's id for the game without frame skip, which SB3's wrapper adds
        env: Any = make_atari_env("PongNoFrameskip-v4", n_envs=task.num_envs, seed=0)
        env = VecFrameStack(env, n_stack=4)
    else:
        env = make_vec_env(task.env_id, n_envs=task.num_envs, seed=0)
    classes = {
        "ppo": stable_baselines3.PPO,
        "dqn": stable_baselines3.DQN,
        "sac": stable_baselines3.SAC,
        "td3": stable_baselines3.TD3,
        "tqc": sb3_contrib.TQC,
        "crossq": sb3_contrib.CrossQ,
        "recurrent_ppo": sb3_contrib.RecurrentPPO,
    }
    policy, kwargs = arguments(task, {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU})
    model = classes[task.algo](policy, env, device="cpu", **kwargs)
    clock.threads = torch.get_num_threads()
    model.learn(task.steps, callback=watcher(task, clock))
    clock.mark("end")


if __name__ == "__main__":
    run(side, ("stable-baselines3", "sb3-contrib", "torch", "gymnasium", "numpy"))
