"""Agents on the Hugging Face Hub, without a network: the hub is a directory, behind the client's own functions."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import yaml

from rl_training import load, load_from_hub
from rl_training.api.agent import Agent
from rl_training.cli import main
from rl_training.contracts.errors import CheckpointError, ConfigError, HubError, MissingExtraError
from rl_training.deploy import hub
from tests.small import small_settings

REPO = "somebody/my-agent"
CHECKPOINT = ["config.json", "manifest.json", "metadata.json", "state.json", "state.safetensors"]
OBS = np.random.default_rng(0).uniform(-1, 1, (30, 4)).astype(np.float32)


class FakeHub:
    """Repositories as directories. What is downloaded are links into a cache, as the real client has it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.private: dict[str, bool] = {}

    def create_repo(self, repo_id: str, *, private: bool = False, exist_ok: bool = False) -> str:
        if "/" not in repo_id:
            raise ValueError(f"Repo id must be in the form 'namespace/repo_name': {repo_id}.\nUse another.")
        assert exist_ok or repo_id not in self.private
        self.private.setdefault(repo_id, private)
        self.path(repo_id).mkdir(parents=True, exist_ok=True)
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, commit_message: str, delete_patterns: list[str]
    ) -> None:
        assert "rl_training" in commit_message
        for old in self.path(repo_id).iterdir():
            if any(fnmatch.fnmatch(old.name, pattern) for pattern in delete_patterns):
                old.unlink()
        shutil.copytree(folder_path, self.path(repo_id), dirs_exist_ok=True)

    def snapshot_download(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        if not self.path(repo_id).is_dir():
            raise huggingface_hub.errors.LocalEntryNotFoundError(f"cannot find {repo_id}\nand more")
        cache = self.root / "cache" / (revision or "main")
        shutil.rmtree(cache, ignore_errors=True)
        (cache / "blobs").mkdir(parents=True)
        (cache / "snapshot").mkdir()
        for file in self.path(repo_id).rglob("*"):
            name = file.relative_to(self.path(repo_id))
            if file.is_file() and any(fnmatch.fnmatch(str(name), pattern) for pattern in allow_patterns):
                (cache / "snapshot" / name).parent.mkdir(exist_ok=True)
                blob = cache / "blobs" / str(name).replace("/", "-")
                shutil.copyfile(file, blob)
                (cache / "snapshot" / name).symlink_to(blob)
        return str(cache / "snapshot")

    def path(self, repo_id: str) -> Path:
        return self.root / "repos" / repo_id

    def names(self, repo_id: str = REPO) -> list[str]:
        return sorted(file.name for file in self.path(repo_id).iterdir())


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


@pytest.fixture(scope="module")
def agent() -> Any:
    agent = load("zoo:ppo/CartPole-v1")
    yield agent
    agent.close()


def test_the_fake_is_called_as_the_real_client_would_be() -> None:
    """The fake takes what the client takes: else these tests would prove nothing."""
    import inspect

    for name in ("create_repo", "upload_folder"):
        real = inspect.signature(getattr(huggingface_hub.HfApi, name)).parameters
        assert set(inspect.signature(getattr(FakeHub, name)).parameters) <= set(real)
    real = inspect.signature(huggingface_hub.snapshot_download).parameters
    assert {"repo_id", "revision", "allow_patterns"} <= set(real)


def test_push_and_load(fake: FakeHub, agent: Agent) -> None:
    assert agent.push_to_hub(REPO, num_episodes=3) == f"https://huggingface.co/{REPO}"
    assert fake.names() == ["README.md", *CHECKPOINT]
    assert fake.private == {REPO: False}
    again = load_from_hub(REPO)
    assert type(again) is type(agent)
    np.testing.assert_array_equal(again.predict(OBS)[0], agent.predict(OBS)[0])
    np.testing.assert_array_equal(again.value(OBS), agent.value(OBS))
    assert again.evaluate(num_episodes=2).mean == 500.0
    again.close()


def test_the_model_card(fake: FakeHub, agent: Agent) -> None:
    agent.push_to_hub(REPO, num_episodes=3, private=True)
    assert fake.private == {REPO: True}
    text = (fake.path(REPO) / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    data = yaml.safe_load(front)
    assert data["library_name"] == "rl_training"
    assert {"reinforcement-learning", "CartPole-v1", "PPO"} <= set(data["tags"])
    (entry,) = data["model-index"]
    (result,) = entry["results"]
    assert result["metrics"] == [{"type": "mean_reward", "name": "mean_reward", "value": "500.00 +/- 0.00"}]
    assert result["dataset"]["type"] == "CartPole-v1"
    parsed = huggingface_hub.ModelCard(text).data
    assert parsed.eval_results is not None, "the hub's own parser takes it"
    assert parsed.eval_results[0].metric_value == "500.00 +/- 0.00"
    assert "| 3 | likeliest | 500.00 | 0.00 |" in body
    assert f'load_from_hub("{REPO}")' in body
    config = yaml.safe_load(body.partition("```yaml\n")[2].partition("```")[0])
    assert config["algorithm"]["num_steps"] == agent.config.algorithm.num_steps
    assert config["output_dir"] == "runs"
    assert "replay.mp4" not in text


def test_with_a_video(fake: FakeHub, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    agent.push_to_hub(REPO, num_episodes=1, video=True)
    assert fake.names() == ["README.md", *CHECKPOINT[:3], "replay.mp4", *CHECKPOINT[3:]]
    assert "src='replay.mp4'" in (fake.path(REPO) / "README.md").read_text()
    load_from_hub(REPO).close()
    agent.push_to_hub(REPO, num_episodes=1)
    assert "replay.mp4" not in fake.names(), "what the new one has not is gone"


def test_an_off_policy_agent_leaves_its_replay_at_home(fake: FakeHub) -> None:
    from rl_training import DQN

    agent = DQN("CartPole-v1", eval_every=0, normalize_obs=True, **small_settings("dqn"))
    agent.learn(64, progress=False)
    agent.push_to_hub(REPO, num_episodes=1)
    assert fake.names() == ["README.md", *CHECKPOINT]
    again = load_from_hub(REPO)
    np.testing.assert_array_equal(again.value(OBS), agent.value(OBS))
    agent.close()
    again.close()


def test_a_whole_checkpoint_that_somebody_uploaded_loads_as_well(fake: FakeHub, tmp_path: Path) -> None:
    from rl_training import DQN

    agent = DQN("CartPole-v1", eval_every=0, **small_settings("dqn"))
    agent.learn(64, progress=False)
    agent.save(fake.path(REPO))
    again = load_from_hub(REPO)
    assert again._off_policy().sampler.buffer.num_transitions == 64
    agent.close()
    again.close()


def test_only_what_a_checkpoint_has_is_taken(fake: FakeHub, agent: Agent, tmp_path: Path) -> None:
    agent.push_to_hub(REPO, num_episodes=1)
    repo = fake.path(REPO)
    for name in ("evil.json", "weights.safetensors", "setup.py", "pytorch_model.bin"):
        (repo / name).write_text("{}")
    (repo / "deeper").mkdir()
    (repo / "deeper" / "state.json").write_text("{}")
    path = hub.download(REPO, tmp_path / "pulled")
    assert sorted(os.listdir(path)) == CHECKPOINT
    assert not any(file.is_symlink() for file in path.iterdir())


def test_what_is_damaged_or_made_up_is_refused(fake: FakeHub, agent: Agent, tmp_path: Path) -> None:
    agent.push_to_hub(REPO, num_episodes=1)
    repo = fake.path(REPO)
    manifest = json.loads((repo / "manifest.json").read_text())
    (repo / "config.json").write_text((repo / "config.json").read_text().replace("CartPole-v1", "evil:CartPole-v1"))
    with pytest.raises(CheckpointError, match=r"config.json: is damaged"):
        hub.download(REPO, tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()
    assert sorted(os.listdir(tmp_path)) == ["hub"], "nothing is left behind"
    config = repo / "config.json"
    import hashlib

    manifest["files"]["config.json"] = {
        "sha256": hashlib.sha256(config.read_bytes()).hexdigest(), "size": config.stat().st_size,
    }  # fmt: skip
    (repo / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="would import the module 'evil'"):
        load_from_hub(REPO)
    (repo / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=f"{REPO} is not an agent of rl_training"):
        load_from_hub(REPO)


def test_errors_say_what_to_do(fake: FakeHub, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HubError, match=r"somebody/else: cannot find somebody/else \(a repository is named"):
        load_from_hub("somebody/else")
    with pytest.raises(HubError, match="must be in the form"):
        agent.push_to_hub("nobody", num_episodes=1)
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="exists already and is not overwritten"):
        hub.download(REPO, tmp_path / "there")
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    for call in (lambda: agent.push_to_hub(REPO), lambda: load_from_hub(REPO)):
        with pytest.raises(MissingExtraError, match=r"pip install '.\[hub\]'"):
            call()


def test_the_commands(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["hub", "push", "zoo:ppo/CartPole-v1", REPO, "--num-episodes", "1", "--private"]) == 0
    assert f"to https://huggingface.co/{REPO}" in capsys.readouterr().out
    assert fake.private == {REPO: True}
    assert main(["hub", "pull", REPO]) == 0
    assert "rl-training eval my-agent" in capsys.readouterr().out
    assert main(["hub", "pull", REPO, "deep/other", "--revision", "v1"]) == 0
    assert (tmp_path / "hub" / "cache" / "v1").is_dir()
    assert main(["eval", "deep/other", "--num-episodes", "1"]) == 0
    assert "mean return 500.00" in capsys.readouterr().out
    assert main(["hub", "pull", REPO]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["hub"]) == main(["hub", "--help"]) == 0
    assert "hub push PATH USER/NAME" in capsys.readouterr().out
    assert main(["hub", "fetch"]) == 2
    assert "expected push or pull, got 'fetch'" in capsys.readouterr().err
    assert main(["hub", "push", "nowhere", REPO]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
