"""Samplers and loggers of others, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_training import DQN, TrainConfig, register_logger, register_sampler, resume, train
from rl_training.cli.train_command import parse_train
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.plugins import LOGGERS, SAMPLERS
from rl_training.data.samplers import UniformIndexer
from rl_training.experiment.logging import LoggedRun
from rl_training.testing.resume import crash_and_resume, differences
from tests.small import small_settings


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (SAMPLERS, LOGGERS):
        monkeypatch.setattr(registry, "_added", {})
    register_sampler("newest")(Newest)
    register_logger("lines")(Lines)


class Newest(UniformIndexer):
    """Only the newest transitions, and a few of them twice."""

    def __init__(self, buffer: Any, rng: np.random.Generator, count: int = 4) -> None:
        super().__init__(rng)
        self.count = count

    def draw(self, buffer: Any, batch_size: int, progress: Any) -> Any:
        slots = (buffer.added - buffer.oldest) * buffer.num_envs
        index = buffer.pick(self.rng.integers(max(0, slots - self.count), slots, size=batch_size))
        return index, np.ones(batch_size, np.float32)


class Lines:
    """Writes one line of JSON for each call."""

    def __init__(self, run: LoggedRun, name: str = "lines.txt") -> None:
        self.path = run.directory / name
        self.path.write_text("".join(f"{line['global_step']}\n" for line in run.history))
        self.run = run

    def log(self, step: int, metrics: Any) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{step}\n")

    def close(self) -> None:
        (self.run.directory / "closed.json").write_text(json.dumps([self.run.run_id, self.run.config["algo"]]))


def test_a_sampler_chooses_what_is_learned_from() -> None:
    agent = DQN("CartPole-v1", eval_every=0, **small_settings("dqn", sampler="newest", sampler_kwargs={"count": 2}))
    agent.learn(50, progress=False)
    sampler = agent._experiment.trainer.sampler
    batch = sampler.sample(64, agent._experiment.trainer.progress)
    newest = sampler.buffer.pick(np.arange(sampler.buffer.added)[-2:])
    assert set(batch.indices.tolist()) == set(newest.tolist())
    agent.close()


def test_a_run_with_own_parts_resumes_exactly(tmp_path: Path) -> None:
    config = TrainConfig(
        algo="dqn", env_id="CartPole-v1", total_timesteps=200, eval_every=100, eval_episodes=1,
        checkpoint_every=50, log_every=20, tensorboard=False, output_dir=tmp_path / "whole",
        loggers=[{"name": "lines"}],  # type: ignore[list-item]
        algorithm=small_settings("dqn", sampler="newest"),  # type: ignore[arg-type]
    )  # fmt: skip
    whole = train(config, progress=False).run_dir
    assert whole is not None
    resumed = crash_and_resume(config.replace(output_dir=tmp_path / "resumed"), [120])
    assert differences(whole, resumed) == []
    assert (resumed / "lines.txt").read_text() == (whole / "lines.txt").read_text()
    assert json.loads((whole / "closed.json").read_text())[1] == "dqn"
    named = [(entry["kind"], entry["name"]) for entry in json.loads((whole / "metadata.json").read_text())["plugins"]]
    assert named == [("logger", "lines"), ("sampler", "newest")]
    with pytest.warns(UserWarning, match="the schedules of epsilon ended"):
        resume(whole, total_timesteps=250, progress=False, loggers=[])  # may change


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sampler": "newset"}, r"sampler: unknown sampler 'newset'\. Did you mean 'newest'\?"),
        ({"sampler": "newest", "prioritized": True}, "sampler: cannot be '.*' while prioritized is true"),
        ({"sampler_kwargs": {"count": 1}}, "sampler_kwargs: need a registered sampler, but sampler is none"),
        (
            {"sampler": "newest", "sampler_kwargs": {"size": 1}},
            "sampler_kwargs: the sampler 'newest' cannot be called with",
        ),
        ({"sampler": "nothing"}, "sampler: 'nothing' must return an Indexer, .* object has no by_priority"),
    ],
)
def test_mistakes_with_samplers(settings: dict[str, Any], expected: str) -> None:
    register_sampler("nothing")(lambda buffer, rng: object())
    with pytest.raises(ConfigError, match=expected):
        DQN("CartPole-v1", **small_settings("dqn", **settings))


def test_mistakes_with_loggers(tmp_path: Path) -> None:
    register_logger("nothing")(lambda run: object())
    base = {"algo": "ppo", "env_id": "CartPole-v1", "eval_every": 0, "output_dir": tmp_path}
    with pytest.raises(ConfigError, match=r"loggers\[0\] > name: unknown logger 'lins'\. Did you mean 'lines'\?"):
        TrainConfig.from_dict({**base, "loggers": [{"name": "lins"}]})
    with pytest.raises(
        ConfigError, match="'nothing' must return an object with the methods log and close; object has no"
    ):
        train(TrainConfig.from_dict({**base, "loggers": [{"name": "nothing"}]}), progress=False)


def test_the_command_line_takes_loggers_and_arguments() -> None:
    options = ["--loggers", "{name: lines, kwargs: {name: x.txt}}", "--algorithm.sampler", "newest"]
    config, _, _ = parse_train(["dqn", "CartPole-v1", *options, "--algorithm.sampler-kwargs", "count=3"])
    assert [(entry.name, entry.kwargs) for entry in config.loggers] == [("lines", {"name": "x.txt"})]
    assert config.algorithm.sampler_kwargs == {"count": 3}  # type: ignore[attr-defined]
