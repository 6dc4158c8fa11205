"""Studies: they begin with the preset, give up, fail and go on as they should, and leave a preset that trains."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import OperationalError

from rl_training import train
from rl_training.cli import load_config, main
from rl_training.contracts.errors import ConfigError, EnvError, MissingExtraError, RLTrainingError, SpaceError
from rl_training.contracts.schedule import Linear
from rl_training.experiment.config import Layer, TrainConfig, resolve
from rl_training.experiment.presets import presets, resolve_with_preset
from rl_training.experiment.yaml_io import dump_yaml, parse_yaml, read_yaml
from rl_training.tuning import study as studies
from rl_training.tuning import tune as tuning
from rl_training.tuning.report import needs_trust, preset_data
from rl_training.tuning.search_space import read_space, space_for
from rl_training.tuning.tune import TuneConfig, TuneResult, make_plan, tune
from tests.tuning.tasks import FAULTY, MORTAL_BY_MODULE

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat of storage is supposed to be used with Study.optimize")

SMALL: dict[str, Any] = {
    "num_envs": 2, "eval_episodes": 2, "num_steps": 16, "minibatch_size": 16, "num_epochs": 1,
    "network.actor_sizes": [8], "network.critic_sizes": [8],
}  # fmt: skip
FREE = ("learning_rate", "gamma")
SEARCH = {"learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}, "gamma": [0.9, 0.99]}


def small(output_dir: Path, **changes: Any) -> TuneConfig:
    """A study of trials that take a fraction of a second."""
    options = {"trials": 3, "timesteps": 96, "evaluations": 2, "episodes": 2, "set": SMALL, **changes}
    return TuneConfig("ppo", options.pop("env_id", "CartPole-v1"), output_dir=output_dir, **options)


def run(output_dir: Path, search: Any = SEARCH, **changes: Any) -> TuneResult:
    return tune(small(output_dir, **changes), search=search, progress=False)


def study_of(result: TuneResult) -> optuna.Study:
    storage = f"sqlite:///{result.directory / 'study.db'}"
    return optuna.load_study(study_name=result.study_name, storage=storage)


def table(result: TuneResult) -> list[dict[str, str]]:
    with open(result.files["trials"], newline="") as file:
        return list(csv.DictReader(file))


def outcome(result: TuneResult) -> list[Any]:
    """Settings, seeds and scores of all trials that count, in their order."""
    trials = studies.ended(study_of(result))
    return [(t.params, t.user_attrs["seeds"], t.state, t.value, t.intermediate_values) for t in trials]


# The plan


def test_a_study_begins_with_the_preset() -> None:
    plan = make_plan(TuneConfig("ppo", "CartPole-v1"))
    assert plan.preset == "ppo/cartpole"
    assert plan.base == TrainConfig.from_dict(presets()["ppo/cartpole"].data)
    assert plan.study_name == "ppo__CartPole-v1__seed0"
    assert plan.directory == Path("runs/tune/ppo__CartPole-v1__seed0")
    assert plan.url == f"sqlite:///{Path.cwd()}/runs/tune/ppo__CartPole-v1__seed0/study.db"
    assert plan.space == space_for(plan.base)


def test_a_study_without_a_preset_begins_with_the_defaults() -> None:
    plan = make_plan(TuneConfig("dqn", "Blackjack-v1", seed=3, study_name="cards"))
    assert plan.preset is None
    assert plan.base == TrainConfig("dqn", "Blackjack-v1", seed=3)
    assert (plan.study_name, plan.directory.name) == ("cards", "dqn__Blackjack-v1__cards")


def test_settings_that_are_given_are_kept_and_not_searched(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "num_envs: 3\nalgorithm: {gamma: 0.5, network: {activation: relu}, clip_coef: {schedule: linear, start: 0.3}}"
    )
    given = {"learning_rate": 0.1, "network.actor_sizes": [3], "gamma": 0.6}
    plan = make_plan(TuneConfig("ppo", "CartPole-v1", config=file, set=given, timesteps=500))
    own = plan.base.algorithm
    assert (plan.base.num_envs, plan.base.total_timesteps) == (3, 500)
    assert (own.gamma, own.learning_rate, own.clip_coef) == (0.6, 0.1, Linear(0.3))
    assert (own.network.activation, own.network.actor_sizes) == ("relu", (3,))
    assert own.gae_lambda == 0.8, "the preset is underneath"
    fixed = {"gamma", "learning_rate", "clip_coef", "network.activation", "network.actor_sizes", "network.critic_sizes"}
    assert not fixed & plan.space.keys()
    assert "num_epochs" in plan.space


def test_a_file_says_what_is_searched(tmp_path: Path) -> None:
    file = tmp_path / "search.yaml"
    file.write_text("learning_rate: {low: 1e-4, high: 1e-3}\nnum_envs: [1, 2]\n")
    plan = make_plan(TuneConfig("ppo", "CartPole-v1", search=file, set={"learning_rate": 5e-4}))
    assert list(plan.space) == ["learning_rate", "num_envs"], "what is named is searched, even from a given value on"
    assert plan.space["num_envs"].values == (1, 2, 8), "with the value that the study begins with"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"trials": 0}, "tune > trials: must be >= 1"),
        ({"jobs": 0}, "tune > jobs: must be >= 1"),
        ({"pruner": "medain"}, "Did you mean 'median'?"),
        ({"set": {"seed": 3}}, "'seed' has its own option, use --seed"),
        ({"set": {"total_timesteps": 3}}, "'total_timesteps' has its own option, use --timesteps"),
        ({"set": {"lerning_rate": 3}}, "--set: unknown key 'lerning_rate'"),
        ({"set": {"network.activation": "soft"}}, "--set > algorithm > network > activation"),
        ({"set": {"gamma": 2}}, "--set > algorithm > gamma: must be >= 0 and <= 1, got 2"),
        ({"set": {"network": 1, "network.activation": "relu"}}, "'network.activation' is part of another setting"),
        ({"search": Path("nowhere.yaml")}, "nowhere.yaml: cannot be read"),
        ({"algo": "ppoo"}, "Did you mean 'ppo'?"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        tune(TuneConfig(**{"algo": "ppo", "env_id": "CartPole-v1", **options}), progress=False)
    assert problem in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("algo", "env_id", "error"), [("sac", "CartPole-v1", SpaceError), ("ppo", "NoSuchEnv-v0", (ConfigError, EnvError))]
)
def test_an_environment_that_no_trial_could_use_is_refused(tmp_path: Path, algo: str, env_id: str, error: Any) -> None:
    with pytest.raises(error):
        tune(TuneConfig(algo, env_id, output_dir=tmp_path), progress=False)
    assert list(tmp_path.iterdir()) == []


def test_the_extra_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install '.\[tune\]'"):
        tune(TuneConfig("ppo", "CartPole-v1"))


# A whole study


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    """A study with everything switched on, that several tests look at."""
    free = {name: value for name, value in SMALL.items() if not name.startswith("network")}
    return run(tmp_path_factory.mktemp("study"), None, trials=8, seeds=2, set=free, study_name="all of <it>")


def test_the_first_trial_has_the_settings_that_the_study_began_with(result: TuneResult) -> None:
    plan = make_plan(small(result.directory.parent.parent, set={k: v for k, v in SMALL.items() if "network" not in k}))
    first = study_of(result).trials[0]
    assert studies.config_of(plan, first) == plan.base
    assert first.user_attrs["base"] is True
    assert result.first_score == first.value


def test_every_trial_is_recorded(result: TuneResult) -> None:
    trials, rows = study_of(result).trials, table(result)
    assert len(trials) == len(rows) == sum(result.counts.values()) == 8
    assert result.counts["complete"] >= studies.STARTUP_TRIALS
    for trial, row in zip(trials, rows, strict=True):
        assert int(row["trial"]) == trial.number
        assert row["state"] == {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}[trial.state.name]
        assert row["learning_rate"] == str(trial.params["learning_rate"])
        assert [int(seed) for seed in row["seeds"].split()] == trial.user_attrs["seeds"]
        assert (row["score"] == "") == (trial.value is None or row["state"] != "complete")
    assert len({tuple(t.user_attrs["seeds"]) for t in trials}) == 8
    assert len({t.params["learning_rate"] for t in trials}) == 8
    best = max((t for t in trials if t.state.name == "COMPLETE"), key=lambda t: t.value)
    assert (result.best_trial, result.best_score) == (best.number, best.value)


def test_trials_are_evaluated_at_equal_steps(result: TuneResult) -> None:
    for trial in study_of(result).trials:
        assert set(trial.intermediate_values) <= {33, 66}
    assert any(set(trial.intermediate_values) == {33, 66} for trial in study_of(result).trials)


def test_the_preset_states_differences_and_where_they_come_from(result: TuneResult) -> None:
    text = result.files["preset"].read_text()
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert "study all of <it>, starting from preset ppo/cartpole" in comments[0]
    assert "the best of 8 trials (" in comments[1]
    assert re.search(r"written on \d{4}-\d\d-\d\d", comments[1])
    assert (
        f"Trial {result.best_trial}: mean return {result.best_score:.2f} over 2 episodes after 96 steps" in comments[2]
    )
    data = read_yaml(result.files["preset"])
    assert data["total_timesteps"] == 96
    assert {"seed", "output_dir", "eval_every"} & data.keys() <= {"eval_every"}
    assert resolve([Layer(data, "preset", trusted=False)]).replace(output_dir="x") == result.best.replace(
        output_dir="x"
    )


def test_the_preset_trains_as_it_is(result: TuneResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--config", str(result.files["preset"]), "--output-dir", str(tmp_path), "--quiet"]
    assert main(command) == 0
    (run_dir,) = tmp_path.iterdir()
    trained = load_config(run_dir / "config.yaml")
    assert trained.algorithm == result.best.algorithm
    assert (trained.total_timesteps, trained.num_envs) == (96, 2)
    assert "finished after 96 steps" in capsys.readouterr().out


def test_the_score_is_that_of_training_with_these_settings(result: TuneResult) -> None:
    from rl_training import PPO
    from rl_training.contracts.random import draw_seed, random_stream

    best, scores = study_of(result).trials[result.best_trial], []
    for number, seed in enumerate(best.user_attrs["seeds"]):
        agent = PPO(result.best, seed=seed, eval_every=0)
        agent.learn(progress=False)
        scores.append(agent.evaluate(2, seed=draw_seed(random_stream(0, "score", number))).mean)
        agent.close()
    assert sum(scores) / 2 == result.best_score


def test_the_report_is_one_page_that_needs_no_network(result: TuneResult) -> None:
    page = result.files["report"].read_text()
    body = re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.DOTALL)
    assert page.count("plotly.js v") == 1, "the script is in it, once"
    assert not re.search(r"<script[^>]+src=|<link|<img|<iframe|@import|url\(http", body + STYLES(page))
    assert not re.search(r"<script[^>]+src=", page)
    (data,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', page)
    charts = json.loads(data)
    assert len(charts) == 6
    assert all(chart["traces"] for chart in charts)
    assert "Content-Security-Policy" in page, "made by the builder of all pages"
    for heading in ("Optimization history", "Importance of the settings", "Parallel coordinates", "Slices",
                    "Evaluations during the trials", "Timeline", "Trials"):  # fmt: skip
        assert f"<h2>{heading}</h2>" in body
    assert "Not yet" not in body
    assert "all of &lt;it&gt;" in body
    assert "<it>" not in body
    assert "total_timesteps: 96" in body


def STYLES(page: str) -> str:  # noqa: N802 - a short word for one place
    return "".join(re.findall(r"<style>.*?</style>", page, flags=re.DOTALL))


def test_what_was_searched_is_written_and_can_be_given_again(result: TuneResult) -> None:
    data = read_yaml(result.files["search"])
    assert set(data) == set(study_of(result).trials[0].params) | {"network.critic_sizes"}
    assert list(read_space(data, result.best)) == list(data)


# Giving up and failing


def test_the_median_pruner_gives_trials_up(tmp_path: Path) -> None:
    """A learning rate of zero learns nothing; one after five that do not is given up as soon as it is below them."""
    found = run(tmp_path, trials=16, timesteps=600, evaluations=3, episodes=1)
    rows = table(found)
    pruned = [row for row in rows if row["state"] == "pruned"]
    assert pruned
    assert all(int(row["trial"]) >= studies.STARTUP_TRIALS for row in pruned)
    assert all(re.match(r"pruned after (302|453) steps, with return \d", row["reason"]) for row in pruned)
    assert all(row["score"] == "" for row in pruned)


@pytest.mark.parametrize(("pruner", "sampler"), [("none", "random"), ("halving", "tpe")])
def test_other_pruners_and_samplers(tmp_path: Path, pruner: Any, sampler: Any) -> None:
    found = run(tmp_path, trials=10, timesteps=600, evaluations=3, episodes=1, pruner=pruner, sampler=sampler)
    assert (found.counts["pruned"] > 0) == (pruner == "halving")
    assert found.counts["complete"] + found.counts["pruned"] == 10


def test_settings_that_diverge_are_given_up_and_the_study_goes_on(tmp_path: Path) -> None:
    found = run(tmp_path, {"learning_rate": [1e30]}, trials=4, evaluations=0, sampler="random")
    rows = table(found)
    bad = [row for row in rows if row["learning_rate"] == "1e+30"]
    assert bad
    assert {row["state"] for row in bad} == {"pruned"}
    assert all("NonFiniteError: " in row["reason"] for row in bad)
    assert {row["state"] for row in rows if row not in bad} == {"complete"}


def test_settings_that_do_not_go_together_are_given_up(tmp_path: Path) -> None:
    shared = {**SMALL, "network.shared": True}
    found = run(tmp_path, {"network.actor_sizes": [[4], [8]]}, trials=6, set=shared, sampler="random")
    rows = table(found)
    bad = [row for row in rows if row["network.actor_sizes"] == "[4]"]
    assert 0 < len(bad) < 6
    assert all(row["state"] == "pruned" and "needs equal actor_sizes" in row["reason"] for row in bad)


def faulty(tmp_path: Path, fails: str) -> dict[str, Any]:
    kwargs = {"counter": str(tmp_path / "counter"), "fails": fails}
    return {"env_id": FAULTY, "set": {**SMALL, "num_envs": 1, "env_kwargs": kwargs}, "evaluations": 0}


def test_a_trial_whose_environment_fails_is_recorded_and_the_study_goes_on(tmp_path: Path) -> None:
    # attempt 0 is the look before the study; then each trial makes one to learn in and one to be judged in
    found = run(tmp_path / "runs", trials=3, **faulty(tmp_path, "3"))
    states = [(row["state"], row["reason"]) for row in table(found)]
    assert [state for state, _ in states] == ["complete", "failed", "complete"]
    assert "the motor is broken" in states[1][1]
    assert found.counts == {"complete": 2, "pruned": 0, "failed": 1}


def test_a_study_in_which_everything_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RLTrainingError, match=r"no trial of the study .* has a score: 2 trials \(2 failed\)") as error:
        run(tmp_path / "runs", trials=2, **faulty(tmp_path, "always"))
    notes = " ".join(error.value.__notes__)
    assert "2 x " in notes
    assert "the motor is broken" in notes
    assert "trials.csv" in notes


# The same again, and going on


def test_a_study_of_one_process_is_decided_by_its_seed(tmp_path: Path) -> None:
    same, again = run(tmp_path / "a", trials=8, seed=5), run(tmp_path / "b", trials=8, seed=5)
    other = run(tmp_path / "c", trials=2, seed=6)
    assert outcome(same) == outcome(again)
    assert outcome(same)[1] != outcome(other)[1]


def test_calling_again_goes_on_to_the_total_number(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", trials=8)
    assert len(outcome(run(tmp_path / "parts", trials=3))) == 3
    parts = run(tmp_path / "parts", trials=8)
    assert outcome(parts) == outcome(whole)
    files = {name: path.stat().st_mtime_ns for name, path in parts.files.items()}
    assert outcome(run(tmp_path / "parts", trials=5)) == outcome(whole), "there are enough: nothing is added"
    assert all(path.stat().st_mtime_ns > files[name] for name, path in parts.files.items()), "written anew"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"timesteps": 128}, "total_timesteps: 96 then, 128 now"),
        ({"episodes": 3}, "episodes: 2 then, 3 now"),
        ({"set": {**SMALL, "ent_coef": 0.1}}, "ent_coef: 0.0 then, 0.1 now"),
        ({"search": {"gamma": [0.9]}}, "search.gamma"),
    ],
)
def test_other_settings_are_another_study(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    run(tmp_path, trials=1)
    with pytest.raises(ConfigError) as error:
        run(tmp_path, trials=2, **change)
    assert "was started with other settings" in str(error.value)
    assert said in str(error.value)
    assert "--study-name" in str(error.value)


def test_a_timeout_begins_no_further_trial(tmp_path: Path) -> None:
    found = run(tmp_path, trials=500, timeout=0.5)
    assert 1 <= len(table(found)) < 100
    assert not found.interrupted


@pytest.mark.parametrize("number", [0, 3])
def test_ctrl_c_keeps_the_study_and_the_next_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    whole = run(tmp_path / "whole", trials=6)
    report = studies.Pruning.on_evaluation

    def interrupt(self: studies.Pruning, *args: Any) -> None:
        report(self, *args)
        if self.trial.number == number:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(studies.Pruning, "on_evaluation", interrupt)
        if number == 0:  # nothing has a score yet, so there is nothing to write
            with pytest.raises(KeyboardInterrupt):
                run(tmp_path / "stopped", trials=6)
        else:
            stopped = run(tmp_path / "stopped", trials=6)
            assert stopped.interrupted
            assert len(table(stopped)) == number
            assert stopped.files["preset"].exists()
    found = run(tmp_path / "stopped", trials=6)
    assert outcome(found) == outcome(whole)
    assert [trial.state.name for trial in study_of(found).trials][number] == "FAIL"


COMMAND = [
    *("tune", "ppo", "CartPole-v1", "--trials", "6", "--timesteps", "1500", "--evaluations", "2", "--episodes", "2"),
    *("--set", *(f"{name}={value}" for name, value in SMALL.items())),
]


def test_a_study_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    search = tmp_path / "search.yaml"
    search.write_text(dump_yaml(SEARCH))
    command = [
        sys.executable,
        "-m",
        "rl_training.cli",
        *COMMAND,
        "--search",
        search,
        "--output-dir",
        tmp_path / "killed",
    ]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "trial   1" not in process.stdout.readline():
        assert process.poll() is None
    database = next((tmp_path / "killed").rglob("study.db"))
    wait_for(lambda: is_in_a_trial(process, database))
    process.kill()
    process.wait()
    process.stdout.close()
    assert [t.state.name for t in trials_in(database)][-1] == "RUNNING"
    options = {"trials": 6, "timesteps": 1500}
    killed, whole = run(tmp_path / "killed", **options), run(tmp_path / "whole", **options)
    assert outcome(killed) == outcome(whole)
    lost = [trial for trial in study_of(killed).trials if trial.state.name == "FAIL"]
    assert len(lost) == 1
    assert len(study_of(killed).trials) == 7


def is_in_a_trial(process: subprocess.Popen[str], database: Path) -> bool:
    """Whether a process that is held up is within a trial; if it is not, it goes on."""
    process.send_signal(signal.SIGSTOP)
    with contextlib.suppress(OperationalError, StorageInternalError):  # held up while it writes
        last = trials_in(database)[-1]
        if last.state.name == "RUNNING" and "seeds" in last.user_attrs:
            return True
    process.send_signal(signal.SIGCONT)
    return False


def trials_in(database: Path) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=None, storage=f"sqlite:///{database}").trials


def wait_for(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_trial_that_kills_every_process_is_given_up(tmp_path: Path) -> None:
    """Begun again a few times, then recorded as failed: its settings may be why."""
    plan = make_plan(small(tmp_path), SEARCH)
    plan.directory.mkdir(parents=True)
    with studies.quietly():
        study = studies.open_study(plan)
        for attempt in range(studies.MAX_LOSSES + 1):
            trial = study.ask()
            trial.set_user_attr("where", studies._here(plan))
            assert studies.remaining(study, 3) == 3, "a trial that is repeated does not count"
            assert studies.repeat_lost(study, plan)
            assert trial.number == attempt
        assert studies.remaining(study, 3) == 2
        assert studies.reason(studies.ended(study)[0]) == "its process ended"
        assert not studies.repeat_lost(study, plan)


def test_a_trial_of_another_machine_is_left_alone(tmp_path: Path) -> None:
    plan = make_plan(small(tmp_path, storage=f"sqlite:///{tmp_path}/shared.db"), SEARCH)
    plan.directory.mkdir(parents=True)
    with studies.quietly():
        study = studies.open_study(plan)
        study.ask().set_user_attr("where", "elsewhere:/runs")
        assert not studies.repeat_lost(study, plan)
        assert study.trials[0].state.name == "RUNNING"


def test_a_trial_without_a_sign_of_life_is_repeated_by_others(tmp_path: Path) -> None:
    plan = make_plan(small(tmp_path, storage=f"sqlite:///{tmp_path}/shared.db"), SEARCH)
    with studies.quietly():
        study = studies.open_study(plan)
        storage = studies.open_storage(plan.url)
        assert storage.get_heartbeat_interval() == studies.HEARTBEAT
        trial = study.ask()
        storage.get_heartbeat_stale_trial_callback()(study, study.trials[trial.number])
        assert study.trials[1].user_attrs == {"base": True, "again": 0, "losses": 1}


# Several processes


def test_two_processes_share_a_study_and_one_that_dies_has_its_trial_repeated(tmp_path: Path) -> None:
    kwargs = {"flag": str(tmp_path / "has-happened")}
    settings = {**SMALL, "num_envs": 1, "env_kwargs": kwargs}
    found = run(tmp_path / "runs", trials=6, jobs=2, env_id=MORTAL_BY_MODULE, set=settings)
    assert (tmp_path / "has-happened").exists()
    trials = study_of(found).trials
    assert found.counts["complete"] + found.counts["pruned"] == 6
    assert [trial.state.name for trial in trials].count("FAIL") == 1
    (again,) = [trial for trial in trials if "again" in trial.user_attrs]
    lost = trials[again.user_attrs["again"]]
    assert lost.state.name == "FAIL"
    assert again.params == lost.params
    assert again.user_attrs["seeds"] == lost.user_attrs["seeds"]
    assert again.user_attrs["pid"] != lost.user_attrs["pid"]
    pids = {trial.user_attrs["pid"] for trial in trials}
    assert len(pids) >= 2
    assert os.getpid() not in pids
    assert needs_trust(found.best)


def test_a_directory_is_worked_on_by_one_call_at_a_time(tmp_path: Path) -> None:
    from rl_training.experiment.lock import run_lock

    found = run(tmp_path, trials=1)
    with run_lock(found.directory), pytest.raises(ConfigError, match="another process runs this study"):
        run(tmp_path, trials=2)


def test_processes_that_cannot_begin_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = tuning.multiprocessing.get_context("fork")  # quicker, and it knows what is patched here
    monkeypatch.setattr(tuning.multiprocessing, "get_context", lambda kind: fork)
    monkeypatch.setattr(tuning, "_worker", lambda plan, deadline: os._exit(1))
    with pytest.raises(RLTrainingError, match="end before they start a trial: they printed nothing"):
        run(tmp_path, jobs=2)


# Storages


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_machines_share_a_study_by_its_storage(tmp_path: Path, kind: str) -> None:
    options = {"storage": f"{kind}:///{tmp_path}/shared.file", "study_name": "ours", "search": SEARCH}
    run(tmp_path / "one", trials=3, **options)
    found = run(tmp_path / "two", trials=5, **options)
    assert len(table(found)) == 5
    assert found.study_name == "ours"
    assert found.directory == tmp_path / "two" / "tune" / "ppo__CartPole-v1__ours"
    assert not (found.directory / "study.db").exists()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("nonsense", "Use sqlite:///FILE"),
        ("sqlite://", "which other processes cannot read"),
        ("redis://localhost", "cannot be opened"),
        ("postgresql://me:secret@nowhere.invalid/db", "'postgresql://me:***@nowhere.invalid/db' cannot be opened"),
        ("sqlite:////no/such/directory/study.db", "unable to open database file"),
    ],
)
def test_a_storage_that_cannot_be_used_is_said_without_its_password(tmp_path: Path, url: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        run(tmp_path, storage=url)
    assert problem in str(error.value)
    assert "secret" not in str(error.value)


def test_a_file_that_is_no_database_is_said(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is no database, and long enough to be taken for one " * 50)
    with pytest.raises(ConfigError, match=r"text.db' cannot be opened: .*not a database"):
        run(tmp_path, storage=f"sqlite:///{tmp_path}/text.db")


def test_a_study_of_another_program_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/theirs.db"
    theirs = optuna.create_study(storage=url, study_name="theirs", direction="maximize")
    theirs.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(ConfigError, match="has trials of another program"):
        run(tmp_path, storage=url, study_name="theirs")


# Presets


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_preset_says_all_that_differs_from_the_defaults_and_from_what_it_is_put_upon(name: str) -> None:
    preset = presets()[name]
    env_id = preset.env_id.replace("*", "Freeway-v5")
    config = TrainConfig.from_dict({**preset.data, "env_id": env_id})
    default = TrainConfig(config.algo, env_id, env_kwargs=config.env_kwargs, wrappers=config.wrappers)
    for wanted in (config, default, default.replace(algorithm={**default.to_dict()["algorithm"], "gamma": 0.123})):
        data = parse_yaml(dump_yaml(preset_data(wanted)), "preset")
        assert resolve([Layer(data, "alone", trusted=False)]) == wanted
        assert resolve_with_preset([Layer(data, "with --config", trusted=False)])[0] == wanted
    assert preset_data(default).keys() <= {"algo", "env_id", "env_kwargs", "wrappers", *config.to_dict()}


def test_a_preset_of_the_defaults_has_nothing_but_its_place() -> None:
    assert preset_data(TrainConfig("ppo", "Blackjack-v1", seed=3)) == {"algo": "ppo", "env_id": "Blackjack-v1"}


def test_of_a_section_only_what_differs_from_the_algorithms_own_default_is_written() -> None:
    config = TrainConfig("a2c", "Blackjack-v1", algorithm={"optimizer": {"eps": 1e-3}})  # type: ignore[arg-type]
    data = preset_data(config)
    assert data["algorithm"] == {"optimizer": {"eps": 1e-3}}
    assert TrainConfig.from_dict(data) == config


def test_training_with_a_preset_of_a_study_is_the_same_from_python(result: TuneResult, tmp_path: Path) -> None:
    config = load_config(result.files["preset"]).replace(output_dir=tmp_path)
    assert train(config, progress=False).env_steps == 96
