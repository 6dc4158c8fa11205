"""A checkpoint of format 1, frozen here, must load for ever.

It was made once, by running this file (`python tests/experiment/test_frozen_checkpoint.py`), and is not made anew:
a version that cannot read it has to learn to. A new format gets a frozen checkpoint of its own beside it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rl_training import PPO, load
from rl_training.experiment.checkpointing import load_checkpoint

HERE = Path(__file__).parent.parent / "frozen" / "format_1"
OBSERVATIONS = np.linspace(-0.2, 0.2, 40, dtype=np.float32).reshape(10, 4)


def freeze() -> None:
    """Make the frozen checkpoint and what it must answer."""
    network = {"actor_sizes": [8], "critic_sizes": [8]}
    settings = {"num_envs": 2, "num_steps": 16, "minibatch_size": 16, "num_epochs": 2, "network": network}
    agent = PPO("CartPole-v1", seed=1, eval_every=0, normalize_obs=True, normalize_reward=True, **settings)
    agent.learn(256, progress=False)
    agent.save(HERE / "checkpoint")
    answers = {
        "actions": agent.predict(OBSERVATIONS)[0].tolist(),
        "values": agent.value(OBSERVATIONS).tolist(),
        "num_timesteps": agent.num_timesteps,
    }
    (HERE / "answers.json").write_text(json.dumps(answers, indent=1) + "\n")


def test_it_loads_and_answers_as_it_did() -> None:
    answers = json.loads((HERE / "answers.json").read_text())
    agent = load(HERE / "checkpoint")
    assert isinstance(agent, PPO)
    assert agent.num_timesteps == answers["num_timesteps"] == 256
    assert agent.predict(OBSERVATIONS)[0].tolist() == answers["actions"]
    assert len(set(answers["actions"])) == 2, "not a constant answer"
    assert agent.value(OBSERVATIONS) == pytest.approx(answers["values"], rel=1e-4)
    agent.close()


def test_it_goes_on_learning() -> None:
    agent = load(HERE / "checkpoint")
    assert agent.learn(64, progress=False).env_steps == 320
    agent.close()


def test_it_is_of_the_format_it_says() -> None:
    assert json.loads((HERE / "checkpoint" / "manifest.json").read_text())["format"] == 1
    assert load_checkpoint(HERE / "checkpoint").metadata["resume_grade"] == "exact"


if __name__ == "__main__":
    freeze()
