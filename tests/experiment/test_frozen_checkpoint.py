"""A checkpoint of each format, frozen here, must load for ever.

They were made once, by running this file (`python tests/experiment/test_frozen_checkpoint.py 2`), and are not made
anew: a version that cannot read them has to learn to. A new format gets a frozen checkpoint of its own beside them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_training import DQN, PPO, load
from rl_training.data import replay_buffer
from rl_training.experiment.checkpointing import _digest, load_checkpoint
from rl_training.experiment.files import write_json
from tests.small import small_settings

FROZEN = Path(__file__).parent.parent / "frozen"
FORMATS = {1: PPO, 2: DQN, 3: PPO}
GRADES = {1: "exact", 2: "exact", 3: "weights-only"}
OBSERVATIONS = np.linspace(-0.2, 0.2, 40, dtype=np.float32).reshape(10, 4)

each_format = pytest.mark.parametrize("number", FORMATS)


def make_1() -> Any:
    network = {"actor_sizes": [8], "critic_sizes": [8]}
    settings = {"num_envs": 2, "num_steps": 16, "minibatch_size": 16, "num_epochs": 2, "network": network}
    return PPO("CartPole-v1", seed=1, eval_every=0, normalize_obs=True, normalize_reward=True, **settings)


def make_2() -> Any:
    replay_buffer.SEGMENT_BYTES = 1000  # several files
    own = small_settings("dqn", prioritized=True, n_step=2, buffer_size=100, epsilon=0.2, importance_exponent=0.5)
    own |= {"learning_rate": 1e-2, "updates_per_step": 1.0}
    return DQN("CartPole-v1", num_envs=2, seed=1, eval_every=0, normalize_obs=True, **own)


def freeze(number: int) -> None:
    """Make the frozen checkpoint and what it must answer, without what it tells of the machine."""
    here = FROZEN / f"format_{number}"
    agent = {1: make_1, 2: make_2, 3: make_1}[number]()
    agent.learn(256, progress=False)
    agent.save(here / "checkpoint", weights_only=number == 3)
    about = json.loads((here / "checkpoint" / "metadata.json").read_text())
    about = {**about, "git_commit": None, "hardware": {**about.get("hardware", {}), "system": "Linux"}}
    write_json(here / "checkpoint" / "metadata.json", about)
    manifest = json.loads((here / "checkpoint" / "manifest.json").read_text())
    path = here / "checkpoint" / "metadata.json"
    manifest["files"]["metadata.json"] = {"sha256": _digest(path), "size": path.stat().st_size}
    write_json(here / "checkpoint" / "manifest.json", manifest)
    answers = {
        "actions": agent.predict(OBSERVATIONS)[0].tolist(),
        "values": agent.value(OBSERVATIONS).tolist(),
        "num_timesteps": agent.num_timesteps,
    }
    (here / "answers.json").write_text(json.dumps(answers, indent=1) + "\n")


@each_format
def test_it_loads_and_answers_as_it_did(number: int) -> None:
    answers = json.loads((FROZEN / f"format_{number}" / "answers.json").read_text())
    agent = load(FROZEN / f"format_{number}" / "checkpoint")
    assert isinstance(agent, FORMATS[number])
    assert agent.num_timesteps == answers["num_timesteps"] == 256
    assert agent.predict(OBSERVATIONS)[0].tolist() == answers["actions"]
    assert len(set(answers["values"])) == 10, "not a constant answer"
    assert agent.value(OBSERVATIONS) == pytest.approx(answers["values"], rel=1e-4)
    agent.close()


@each_format
@pytest.mark.filterwarnings("ignore:the schedules of")
def test_it_goes_on_learning(number: int) -> None:
    agent = load(FROZEN / f"format_{number}" / "checkpoint")
    assert agent.learn(64, progress=False).env_steps == 320
    agent.close()


@each_format
def test_it_is_of_the_format_it_says(number: int) -> None:
    path = FROZEN / f"format_{number}" / "checkpoint"
    assert json.loads((path / "manifest.json").read_text())["format"] == number
    assert load_checkpoint(path).metadata["resume_grade"] == GRADES[number]


def test_its_replay_is_whole() -> None:
    agent = load(FROZEN / "format_2" / "checkpoint")
    buffer = agent._off_policy().sampler.buffer
    assert (buffer.added, buffer.oldest, buffer.num_transitions) == (128, 78, 100)
    assert len(list((FROZEN / "format_2" / "checkpoint").glob("segment_*"))) > 1
    assert buffer.reward[buffer.everything()].tolist() == [1.0] * 100
    agent.close()


if __name__ == "__main__":
    freeze(int(sys.argv[1]))
