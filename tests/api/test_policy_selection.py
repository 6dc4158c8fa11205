"""Ranking of agents by recorded data, in Python and on the command line."""

import json
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_training import DQN, rank_policies
from rl_training.cli import main
from rl_training.contracts.errors import ConfigError
from rl_training.data.dataset import Dataset, write_dataset

ROWS = 40


def bandit():
    """Episodes of one step in CartPole's spaces, actions at random: action 1 pays 3, action 0 pays 1."""
    actions = np.arange(ROWS) % 2
    return Dataset(
        observations=np.zeros((ROWS, 4), np.float32),
        actions=actions,
        rewards=1.0 + 2.0 * actions,
        terminated=np.ones(ROWS, bool),
        truncated=np.zeros(ROWS, bool),
        final_observations=np.zeros((ROWS, 4), np.float32),
        observation_space=spaces.Box(-10, 10, (4,)),
        action_space=spaces.Discrete(2),
        extras={"log_prob": np.full(ROWS, math.log(0.5))},
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Agents that always take action 0 and action 1, and the data."""
    folder = tmp_path_factory.mktemp("agents")
    for action in (0, 1):
        agent = DQN("CartPole-v1", network={"sizes": [4]}, buffer_size=10)
        with torch.no_grad():
            for parameter in agent.policy.network.parameters():
                parameter.zero_()
            [part for part in agent.policy.network.modules() if isinstance(part, torch.nn.Linear)][-1].bias[action] = (
                1.0
            )
        agent.save(folder / f"always{action}", weights_only=True)
    write_dataset(bandit(), folder / "data.npz")
    return folder


@pytest.mark.parametrize("method", ["wis", "fqe"])
def test_the_better_policy_comes_first(method, saved):
    settings = {"num_updates": 300, "sizes": (), "learning_rate": 3e-2, "batch_size": 64} if method == "fqe" else {}
    paths = [saved / "always0", saved / "always1"]
    first, second = rank_policies(paths, saved / "data.npz", method, deterministic=True, **settings)
    assert (first.path, second.path) == (paths[1], paths[0])
    assert first.estimate.value == pytest.approx(3.0, abs=0.05)
    assert second.estimate.value == pytest.approx(1.0, abs=0.05)


def test_the_command_prints_the_ranking(saved, capsys):
    command = ["ope", str(saved / "always0"), str(saved / "always1"), "--dataset", str(saved / "data.npz")]
    command += ["--method", "wis", "--deterministic"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(entry["path"][-1], entry["value"]) for entry in found] == [("1", 3.0), ("0", 1.0)]
    assert found[0]["effective_episodes"] == ROWS / 2
    assert main(command) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("weighted importance sampling, gamma 0.99, 40 episodes")
    assert "20.0 effective episodes" in printed[2]


def test_all_that_is_missing_is_named_at_once(capsys):
    assert main(["ope", "--stochastic", "--deterministic"]) == 2
    said = capsys.readouterr().err
    assert "path: missing" in said
    assert "--dataset: missing" in said
    assert "use only one of them" in said
    with pytest.raises(ConfigError, match="path: missing"):
        rank_policies([], bandit())


def test_wrong_settings_are_refused_before_anything_is_trained(saved, capsys):
    command = ["ope", str(saved / "always0"), "--dataset", str(saved / "data.npz")]
    assert main([*command, "--fqe.num-updates", "0"]) == 2
    assert "num_updates: must be >= 1, got 0" in capsys.readouterr().err
