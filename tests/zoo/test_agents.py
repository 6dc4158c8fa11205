"""The agents that ship with the package: each loads from it, is small, and is as good as it says."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest
from PIL import Image
from scripts import make_zoo_agents
from scripts.make_zoo_agents import GOOD, picture_of

import rl_training
from rl_training import Agent, evaluate, load
from rl_training.algorithms.registry import get_spec
from rl_training.cli import main
from rl_training.contracts.errors import CheckpointError
from rl_training.experiment.agents import ZooAgent, is_zoo, locate, zoo_agents
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.experiment.presets import presets
from rl_training.zoo.manifest import Manifest, write_manifest
from rl_training.zoo.suites import Normalization, Protocol, get_suite, suites, task_config
from rl_training.zoo.worker import measure, run_config
from tests.zoo.manifests import task_result

MAX_BYTES = 300_000
EPISODES = 10
each_agent = pytest.mark.parametrize("agent", zoo_agents().values(), ids=zoo_agents())


def shortfall(agent: Agent, stated: ZooAgent) -> float:
    """By how many standard errors (and a little) fewer the agent gets than it states; above 0 it is too few."""
    found = agent.evaluate(EPISODES, deterministic=True, seed=11)
    error = float(stated.result["std"]) / EPISODES**0.5
    return float(stated.result["mean"]) - found.mean - 4.0 * error - 0.01 * abs(float(stated.result["mean"]))


def test_there_are_some_of_every_kind() -> None:
    assert len(zoo_agents()) >= 5
    assert {agent.env_id for agent in zoo_agents().values()} >= {"CartPole-v1", "Pendulum-v1", "Acrobot-v1"}
    assert any(load_checkpoint(agent.path).config["normalize_obs"] for agent in zoo_agents().values())


@each_agent
def test_it_is_as_good_as_it_says_and_an_untrained_one_is_not(agent: ZooAgent) -> None:
    trained = load(agent.address)
    assert trained.config.env_id == agent.env_id
    assert trained.num_timesteps == agent.result["env_steps"] > 0
    assert shortfall(trained, agent) <= 0
    cls = getattr(rl_training, get_spec(trained.config.algo).title)
    short = []
    for seed in (4, 5, 6):  # of which one may balance a pole by luck
        untrained = cls(trained.config.replace(seed=seed))
        short.append(shortfall(untrained, agent))
        untrained.close()
    assert statistics.median(short) > 0, "an untrained policy is told apart"
    trained.close()


@each_agent
def test_it_is_worth_shipping(agent: ZooAgent) -> None:
    scales = [task.normalization for suite in map(get_suite, suites()) for task in suite.tasks]
    config = load_checkpoint(agent.path).config
    fitting = [scale for scale in scales if scale.fits(agent.env_id, config["env_kwargs"])]
    scale = max(fitting, key=lambda scale: len(scale.env_kwargs))
    assert scale.score(agent.result["mean"]) >= GOOD
    assert agent.result["episodes"] == 100
    assert agent.name in presets()
    assert presets()[agent.name].env_id == agent.env_id


@each_agent
def test_it_has_a_small_picture_in_the_gallery(agent: ZooAgent) -> None:
    path = picture_of(agent.name)
    assert path.stat().st_size <= MAX_BYTES
    with Image.open(path) as picture:
        assert picture.n_frames > 1


@each_agent
def test_it_is_small_and_tells_nothing_of_the_machine(agent: ZooAgent) -> None:
    files = [file for file in agent.path.parent.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= MAX_BYTES
    text = "".join(file.read_text() for file in files if file.suffix == ".json")
    for word in ("hostname", "hardware", "git_commit", "/home", "/tmp", "/root", "pid"):
        assert word not in text
    checkpoint = load_checkpoint(agent.path)
    assert checkpoint.metadata["resume_grade"] == "weights-only"
    assert checkpoint.metadata["seed"] == agent.result["seed"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", agent.result["date"])
    assert {"torch", "gymnasium", "rl_training"} <= agent.result["versions"].keys()


def test_addresses_are_of_one_agent_each() -> None:
    addresses = [agent.address for agent in zoo_agents().values()]
    assert len(set(addresses)) == len(addresses)
    about = {"env_id": "LunarLander-v3"}
    assert ZooAgent("ppo/lunarlander", Path("x"), about).address == "zoo:ppo/LunarLander-v3"
    assert ZooAgent("ppo/lunarlander-continuous", Path("x"), about).address == "zoo:ppo/lunarlander-continuous"


def test_names() -> None:
    place = locate("zoo:ppo/cartpole")
    assert locate("zoo:ppo/CartPole-v1") == locate(Path("zoo:ppo/CartPole-v1")) == place
    assert place == zoo_agents()["ppo/cartpole"].path
    assert locate("runs/zoo:ppo") == Path("runs/zoo:ppo")
    assert not is_zoo("zoo/ppo")
    with pytest.raises(
        CheckpointError, match=r"ships no agent 'zoo:ppo/CartPol'. Did you mean 'zoo:ppo/CartPole-v1'\?"
    ):
        load("zoo:ppo/CartPol")
    with pytest.raises(CheckpointError, match=r"with `rl-training zoo agents`"):
        evaluate("zoo:../../secret")


def test_wherever_a_checkpoint_is_taken(tmp_path: Path) -> None:
    assert evaluate("zoo:ppo/CartPole-v1", num_episodes=2).mean == 500.0
    agent = rl_training.PPO("CartPole-v1", init_from="zoo:ppo/CartPole-v1", eval_every=0)
    assert agent.evaluate(num_episodes=2).mean == 500.0
    agent.close()
    with pytest.raises(CheckpointError, match="holds a 'ppo' agent, not 'dqn'"):
        rl_training.DQN.load("zoo:ppo/CartPole-v1")


def test_eval_and_zoo_agents(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "zoo:ppo/CartPole-v1", "--num-episodes", "3"]) == 0
    assert "mean return 500.00 +/- 0.00" in capsys.readouterr().out
    assert main(["zoo", "agents"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for agent in zoo_agents().values():
        (row,) = [line for line in lines if line.split()[:1] == [agent.address]]
        assert f"{agent.result['mean']:.1f} +/- {agent.result['std']:.1f}" in row
    assert main(["zoo", "agents", "sac"]) == 0
    assert "zoo:sac/Pendulum-v1" in [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert main(["eval", "zoo:ppo/Nothing-v0"]) == 2
    assert "ships no agent" in capsys.readouterr().err
    assert main(["resume", "zoo:ppo/CartPole-v1"]) == 2


def test_videos_go_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    before = sorted(path.name for path in locate("zoo:ppo/cartpole").parent.rglob("*"))
    assert main(["eval", "zoo:dqn/Acrobot-v1", "--num-episodes", "1", "--video"]) == 0
    (video,) = tmp_path.rglob("*.mp4")
    assert video.parent.name == "zoo-dqn-Acrobot-v1-videos"
    assert "videos in zoo-dqn-Acrobot-v1-videos" in capsys.readouterr().out
    assert sorted(path.name for path in locate("zoo:ppo/cartpole").parent.rglob("*")) == before


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a suite with one finished run of PPO with a small network, shortened."""
    directory = tmp_path_factory.mktemp("finished")
    config = task_config(presets()["ppo/cartpole"], {"algorithm": SMALL}, "test")
    short = run_config(config.replace(total_timesteps=600), Protocol(2, 2, 2), 2, directory)
    result = measure(short, 2)
    assert result is not None
    about = {"settings": {"algorithm": SMALL}, "normalization": Normalization("CartPole-v1", 0.0, 5.0, "little")}
    other = task_result("ppo/cartpole", result, settings={"total_timesteps": 600})
    write_manifest(
        directory / "manifest.json", Manifest(1, "mine", [task_result("ppo/cartpole", result, **about), other])
    )
    return directory


SMALL = {"network": {"actor_sizes": [8], "critic_sizes": [8]}}


def test_the_script_makes_one_from_a_run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_zoo_agents, "AGENTS", tmp_path)
    monkeypatch.setattr(make_zoo_agents, "EPISODES", 5)
    assert [found.task.settings for found in make_zoo_agents.candidates(finished)] == [{"algorithm": SMALL}]
    assert make_zoo_agents.make_all([finished, tmp_path], ["dqn/cartpole"]) == []
    assert make_zoo_agents.make_all([finished, tmp_path], []) == ["ppo/cartpole"]
    about = json.loads((tmp_path / "ppo/cartpole/result.json").read_text())
    found = evaluate(tmp_path / "ppo/cartpole/checkpoint", 5, deterministic=True, seed=about["episode_seed"])
    assert round(found.mean, 2) == about["mean"], "the same episodes give the same return"
    assert round(statistics.pstdev(found.returns), 2) == about["std"]
    assert about["changes"] == SMALL
    monkeypatch.setattr(make_zoo_agents, "GOOD", 1_000.0)
    assert make_zoo_agents.make_all([finished], []) == []
    assert json.loads((tmp_path / "ppo/cartpole/result.json").read_text()) == about, "the one before is still there"


def test_a_picture_is_small_and_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_zoo_agents, "PICTURES", tmp_path)
    path = make_zoo_agents.film(zoo_agents()["trpo/mountaincar"])
    assert path.stat().st_size <= MAX_BYTES
    with Image.open(path) as picture:
        assert picture.width == make_zoo_agents.WIDTH
        assert picture.n_frames > 20
