"""`rl-training report`: one page that holds everything about a run or a suite, and trusts nothing that it read."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from rl_training.api.session import resume
from rl_training.cli import main
from rl_training.deploy import video
from rl_training.reports import curves, videos
from rl_training.reports.records import read_run
from rl_training.reports.run_report import differences, duration, training_seconds
from rl_training.zoo.manifest import Manifest, write_manifest
from tests.reports.made_up import write_run
from tests.reports.pages import Parsed, assert_self_contained
from tests.zoo.manifests import run_result, task_result

NASTY = '</script><script>window.harm = 1</script><img src=x onerror="window.harm = 1"><a href="https://example.org/">'


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command; gives its code, and what it printed."""

    def run(*args: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["report", *map(str, args)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def run_copy(suite: Path, tmp_path: Path) -> Path:
    """A real run to change at will."""
    return Path(shutil.copytree(suite / "ppo-0", tmp_path / "ppo-0"))


def parsed(path: Path) -> Parsed:
    return Parsed(path.read_text(encoding="utf-8"))


def refused(result: tuple[int, str, str]) -> str:
    code, _, err = result
    assert code == 2
    assert "Traceback" not in err
    return err


# A run


def test_the_page_of_a_real_run_holds_everything(report: Any, run_copy: Path) -> None:
    assert report(run_copy) == (0, f"wrote {run_copy / 'report.html'}\n", "")
    page = parsed(run_copy / "report.html")
    assert_self_contained(page)
    assert page.text("h1") == "PPO on CartPole-v1"
    assert page.text("title") == "PPO on CartPole-v1, seed 0"
    assert page.text("li").splitlines() == ["seed 0", "finished", "resume grade: exact", "ppo-0"]
    assert page.text("h2").splitlines() == [
        *("Videos", "Learning curves", "Evaluations", "Time per part", "Settings"),
        *("Starts and resumes", "Machine and versions"),
    ]
    metadata = json.loads((run_copy / "metadata.json").read_text())
    cells = page.text("td").splitlines()
    assert metadata["versions"]["torch"] in cells
    assert metadata["history"][0]["started"] in cells
    assert "algo: ppo" in page.text("pre")


def test_the_curves_are_those_of_the_files(report: Any, run_copy: Path) -> None:
    assert report(run_copy)[0] == 0
    page = parsed(run_copy / "report.html")
    evaluations = json.loads((run_copy / "evaluations.json").read_text())
    during = [entry for entry in evaluations if not entry.get("final")]
    traces = {trace["name"]: trace for trace in page.charts[0]["traces"]}
    assert traces["evaluations (mean)"]["x"] == [entry["step"] for entry in during] == [64, 128, 192, 256]
    assert traces["evaluations (mean)"]["y"] == pytest.approx([entry["mean"] for entry in during])
    assert traces["evaluation episodes"]["y"] == [value for entry in evaluations for value in entry["returns"]]
    logged = {trace["name"] for chart in page.charts[1:] for trace in chart["traces"]}
    lines = [json.loads(line) for line in (run_copy / "metrics.jsonl").read_text().splitlines()]
    drawn_elsewhere = {"global_step", "time/unix", "rollout/return_mean", "eval/return_mean"}
    assert logged == {name for line in lines for name, value in line.items() if value is not None} - drawn_elsewhere
    rows = page.text("td").splitlines()
    assert all(f"{entry['mean']:,.2f}" in rows for entry in evaluations)


def test_the_film_is_inside(report: Any, run_copy: Path) -> None:
    assert report(run_copy)[0] == 0
    (video,) = parsed(run_copy / "report.html").videos
    (file,) = (run_copy / "videos").glob("*.mp4")
    assert video == file.read_bytes()
    assert video[4:8] == b"ftyp"
    assert b"moov" in video


def test_scripts_are_the_pages_own(report: Any, run_copy: Path) -> None:
    """What the policy lets run is plotly and ours, by their hashes; the data block is no script."""
    assert report(run_copy)[0] == 0
    text = (run_copy / "report.html").read_text(encoding="utf-8")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 2
    assert "plotly.js" in scripts[0][:200]
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"sha256-{digest}" in text[:2000]
    assert "unsafe-eval" not in text[:2000]


def test_settings_that_differ_come_first_with_their_default(report: Any, run_copy: Path) -> None:
    assert report(run_copy)[0] == 0
    text = (run_copy / "report.html").read_text(encoding="utf-8")
    assert "<td><code>num_steps</code></td><td>16</td><td>256</td>" in text
    assert text.index("<code>num_steps</code>") < text.index("Complete config")
    assert "<code>gae_lambda</code>" not in text
    assert differences({"algo": "theirs", "env_id": "X-v0"}) is None


def test_a_resumed_run_shows_its_history(report: Any, run_copy: Path) -> None:
    resume(run_copy, total_timesteps=320, progress=False)
    assert report(run_copy)[0] == 0
    rows = parsed(run_copy / "report.html").text("td").splitlines()
    history = json.loads((run_copy / "metadata.json").read_text())["history"]
    assert len(history) == 2
    place = rows.index("resumed (1)")
    assert rows[place + 1 : place + 4] == [history[1]["started"], "256", "320"]
    assert "320" in parsed(run_copy / "report.html").text("b").splitlines()


def test_nothing_from_files_becomes_part_of_the_page(report: Any, tmp_path: Path) -> None:
    points = [(1, 1.0), (2, 2.0)]
    path = write_run(tmp_path / "run", {f"loss/{NASTY}": points, f"{NASTY}/x": points}, points)
    config = {"algo": NASTY, "env_id": NASTY, "seed": NASTY, NASTY: NASTY, "env_kwargs": {NASTY: NASTY}}
    (path / "config.yaml").write_text(json.dumps(config))
    metadata = {"status": NASTY, "resume_grade": NASTY, "stop_reason": NASTY, "versions": {NASTY: NASTY}}
    metadata |= {"hardware": {NASTY: NASTY}, "git_commit": NASTY, "created": NASTY, "error": NASTY}
    metadata |= {"history": [{"started": NASTY, "total_timesteps": NASTY, NASTY: NASTY}]}
    (path / "metadata.json").write_text(json.dumps(metadata))
    (path / "command.txt").write_text(NASTY)
    (path / "profile.json").write_text(json.dumps({NASTY: [{NASTY: NASTY}], "deep": {NASTY: {NASTY: [NASTY]}}}))
    (path / "evaluations.json").write_text(
        json.dumps([{"step": 1, "mean": 1.0, "std": NASTY, "success_rate": NASTY, "final": NASTY, "returns": NASTY}])
    )
    (path / "videos").mkdir()
    (path / "videos" / "<img src=x onerror=harm>.mp4").write_bytes(b"\0\0\0\x20ftypisom")
    (tmp_path / "manifest.json").write_text(json.dumps({"name": NASTY, "tasks": {NASTY: {NASTY: NASTY}, "b": {}}}))
    for place in (path, tmp_path):
        assert report(place)[0] == 0
        page = parsed(place / "report.html")
        assert_self_contained(page)
        assert page.of("img") == []
        assert len(page.of("script")) == 3
        assert NASTY in page.text()
        texts = [trace["name"] for chart in page.charts for trace in chart["traces"] if "name" in trace]
        assert not any("<" in text for text in texts), "plotly reads a little HTML in labels"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("running", "is still running"),
        ("failed", "This run failed"),
        ("stopped", "was stopped"),
        (None, "has no recorded status"),
    ],
)
def test_a_run_that_is_not_whole_says_so(report: Any, tmp_path: Path, status: str | None, said: str) -> None:
    path = write_run(tmp_path / "run", {"rollout/return_mean": [(5, 1.0)]}, status=str(status))
    metadata = json.loads((path / "metadata.json").read_text())
    if status is None:
        del metadata["status"]
    (path / "metadata.json").write_text(json.dumps({**metadata, "error": "EnvError: it broke"}))
    assert report(path)[0] == 0
    text = parsed(path / "report.html").text("p")
    assert said in text
    assert ("EnvError: it broke" in text) == (status == "failed")


def test_a_run_that_has_only_begun_has_a_page(report: Any, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", status="running")
    (path / "metrics.jsonl").unlink()
    assert report(path)[0] == 0
    text = (path / "report.html").read_text()
    assert "Nothing has been logged yet." in text
    assert "No evaluations yet." in text
    assert "rl-training report PATH --video" in text
    assert len(text) < 100_000, "no charts, no plotly"


def test_a_damaged_run_says_what_is_damaged(report: Any, run_copy: Path) -> None:
    (run_copy / "metadata.json").write_text("{")
    (run_copy / "evaluations.json").write_text("[{}]")
    (run_copy / "profile.json").write_text("[")
    code, _, err = report(run_copy)
    assert code == 0
    assert "metadata.json: is damaged" in err
    text = parsed(run_copy / "report.html").text("p")
    assert "metadata.json: is damaged" in text
    assert "evaluations.json: is damaged" in text
    assert "The profile cannot be shown" in text
    (run_copy / "config.yaml").write_text("algo: [")
    assert "not valid YAML" in refused(report(run_copy))


def test_time_is_summed_over_starts(tmp_path: Path) -> None:
    began = 1_800_000_000
    path = write_run(tmp_path / "run", {"time/unix": [(1, began + 10.5), (2, began + 20.5), (3, began + 1_005.0)]})
    starts = ["2027-01-15T08:00:00+00:00", "2027-01-15T08:16:40+00:00"]  # began, and a thousand seconds later
    metadata = {"status": "finished", "history": [{"started": text} for text in starts]}
    (path / "metadata.json").write_text(json.dumps(metadata))
    assert training_seconds(read_run(path)) == pytest.approx(20.5 + 5.0)
    (path / "metadata.json").write_text(json.dumps({"history": [{"started": "then"}, 3]}))
    assert training_seconds(read_run(path)) == pytest.approx(1_005.0 - 10.5)
    assert [duration(seconds) for seconds in (9.6, 600, 9_000)] == ["10 s", "10 min", "2.5 h"]


def test_shares_of_time_add_up(report: Any, tmp_path: Path) -> None:
    shares = {"time/env_fraction": 0.25, "time/policy_fraction": 0.125, "time/update_fraction": 0.5}
    path = write_run(tmp_path / "run", {name: [(1, 0.9), (2, value)] for name, value in shares.items()})
    assert report(path)[0] == 0
    cells = parsed(path / "report.html").text("td").splitlines()
    assert [cells[cells.index(name) + 1] for name in ("environments", "acting", "learning")] == [
        "25.0%",
        "12.5%",
        "50.0%",
    ]
    assert cells[cells.index("the rest: evaluations, checkpoints, logs") + 1] == "12.5%"


# Films


def test_a_film_is_made_where_there_is_none(report: Any, run_copy: Path) -> None:
    shutil.rmtree(run_copy / "videos")
    assert report(run_copy, "--output", run_copy / "without.html")[0] == 0
    assert parsed(run_copy / "without.html").videos == []
    assert report(run_copy, "--video")[0] == 0
    (video,) = parsed(run_copy / "report.html").videos
    (file,) = (run_copy / "videos").glob("ppo-step-*.mp4")
    assert video == file.read_bytes()
    best = json.loads((run_copy / "checkpoints" / "best" / "metadata.json").read_text())["env_steps"]
    assert file.name.startswith(f"ppo-step-{best}-")


def test_the_newest_checkpoint_is_filmed_if_there_is_no_good_best_one(report: Any, run_copy: Path) -> None:
    shutil.rmtree(run_copy / "videos")
    (run_copy / "checkpoints" / "best" / "state.json").write_text("{}")
    assert report(run_copy, "--video")[0] == 0
    assert [path.name for path in (run_copy / "videos").glob("ppo-step-256-*.mp4")]


def test_what_cannot_be_filmed_leaves_the_rest_of_the_page(report: Any, run_copy: Path) -> None:
    shutil.rmtree(run_copy / "videos")
    shutil.rmtree(run_copy / "checkpoints")
    code, _, err = report(run_copy, "--video")
    assert code == 0
    assert "warning: ppo-0: no video could be recorded: CheckpointError" in err
    page = parsed(run_copy / "report.html")
    assert page.videos == []
    assert "no video could be recorded" in page.text("p")
    assert page.charts


def test_without_the_extra_filming_says_what_to_install(
    report: Any, run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video, "find_spec", lambda name: None)
    assert "pip install '.[video]'" in refused(report(run_copy, "--video"))
    assert report(run_copy)[0] == 0, "an existing video is shown without it"


def test_invalid_or_too_large_videos_are_left_out(report: Any, run_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run_copy / "videos" / "zz-newest.mp4").write_bytes(b"not a video")
    code, _, err = report(run_copy)
    assert code == 0
    assert "zz-newest.mp4 is not a complete mp4 file and is left out" in err
    assert len(parsed(run_copy / "report.html").videos) == 1
    monkeypatch.setattr(videos, "MAX_VIDEO", 100)
    code, _, err = report(run_copy)
    assert code == 0
    assert "MB and is left out" in err
    assert parsed(run_copy / "report.html").videos == []


def test_a_film_that_lies_elsewhere_is_not_shown(report: Any, run_copy: Path, tmp_path: Path) -> None:
    (video,) = (run_copy / "videos").glob("*.mp4")
    shutil.move(video, tmp_path / "private.mp4")
    video.symlink_to(tmp_path / "private.mp4")
    code, _, err = report(run_copy)
    assert code == 0
    assert "is a link to a path outside" in err
    assert parsed(run_copy / "report.html").videos == []


# A suite


def test_the_page_of_a_suite_holds_every_run(report: Any, suite: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(suite, tmp_path / "some-runs", ignore=shutil.ignore_patterns("checkpoints")))
    assert report(root) == (0, f"wrote {root / 'report.html'}\n", "")
    page = parsed(root / "report.html")
    assert_self_contained(page)
    assert page.text("h1") == "some-runs"
    assert page.text("li").splitlines() == ["5 runs", "5 finished", "2 environments", "2 algorithms"]
    assert {"a2c-0", "ppo-0", "ppo-1", "ppo-2", "ppo-lambda"} <= set(page.text("td").splitlines())
    names = [{t["name"] for t in chart["traces"] if "name" in t} for chart in page.charts]
    assert names == [{"A2C (1 seed)"}, {"PPO gae_lambda=0.5 (1 seed)", "PPO gae_lambda=0.95 (3 seeds)"}]
    assert len(page.videos) == 1
    assert "PPO gae_lambda=0.95 on CartPole-v1" in page.text("figcaption")


def test_the_page_of_a_benchmark_has_its_statistics(report: Any, tmp_path: Path) -> None:
    """The scores that the suite judges, on scales from 0 to 100, not those of the runs' own evaluations."""
    write_run(tmp_path / "a", evaluations=[(10, 1.0), (20, 2.0)])
    ppo = task_result("ppo/cartpole", *(run_result(seed, mean) for seed, mean in enumerate([50.0, 70.0, 90.0])))
    pendulum = task_result("ppo/pendulum", *(run_result(seed, mean) for seed, mean in enumerate([30.0, 40.0])))
    dqn = task_result("dqn/cartpole", *(run_result(seed, 20.0 + seed) for seed in range(3)), total_timesteps=100_000)
    write_manifest(tmp_path / "manifest.json", Manifest(1, "mine", [ppo, pendulum, dqn]))
    assert report(tmp_path) == (0, f"wrote {tmp_path / 'report.html'}\n", "")
    page = parsed(tmp_path / "report.html")
    assert_self_contained(page)
    assert page.text("h1") == "mine"
    cells = page.text("td", "b").splitlines()
    assert cells[:6] == ["ppo/cartpole", "CartPole-v1", "3", "final", "70.0", "50.0 to 90.0"]
    assert cells[6:12] == ["50.0, 70.0, 90.0", "70.0", "-", "10.0", "0.70", "500"], (
        "last, best of training, spread, ..."
    )
    place = cells.index("PPO")
    assert cells[place : place + 4] == ["PPO", "1", "3", "0.70"], "only where both were measured alike"
    assert cells[place + 5 : place + 10] == ["DQN", "1", "3", "0.21", "0.20 to 0.22"]
    assert "1.00" in page.text("b"), "PPO is surely better than DQN on the environment that both have"
    efficiency = page.charts[0]
    assert [trace["name"] for trace in efficiency["traces"] if "name" in trace] == ["DQN (3 runs)", "PPO (3 runs)"]
    assert efficiency["traces"][-1]["y"][-1] == pytest.approx(0.7)


def test_final_evaluations_are_averaged_over_seeds(report: Any, tmp_path: Path) -> None:
    for seed, end in enumerate([2.0, 4.0, 9.0]):
        write_run(tmp_path / f"s{seed}", evaluations=[(10, 1.0), (20, end)], seed=seed)
    assert report(tmp_path)[0] == 0
    cells = parsed(tmp_path / "report.html").text("td").splitlines()
    assert cells[:7] == ["CartPole-v1", "PPO", "3", "5.0", "2.0 to 9.0", "2.0", "9.0"]
    for seed in (0, 1):  # two have ended; the third was stopped on its way
        path = tmp_path / f"s{seed}" / "evaluations.json"
        path.write_text(json.dumps([*json.loads(path.read_text()), {"step": 20, "mean": 6.0 + seed, "final": True}]))
    assert report(tmp_path)[0] == 0
    cells = parsed(tmp_path / "report.html").text("td").splitlines()
    assert cells[:7] == ["CartPole-v1", "PPO", "2 of 3", "6.5", "6.0 to 7.0", "6.0", "7.0"]


def test_a_suite_records_each_algorithm_on_each_environment_once(report: Any, suite: Path, tmp_path: Path) -> None:
    root = tmp_path / "suite"
    for name in ("ppo-0", "ppo-1", "a2c-0"):
        shutil.copytree(suite / name, root / name, ignore=shutil.ignore_patterns("videos"))
    assert report(root, "--video")[0] == 0
    assert len(parsed(root / "report.html").videos) == 2
    assert len(list(root.glob("*/videos/*.mp4"))) == 2
    assert report(root, "--video")[0] == 0
    assert len(list(root.glob("*/videos/*.mp4"))) == 2, "a run with a video is not recorded again"


def test_a_suite_with_damage_says_so(report: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "a", status="running")
    (write_run(tmp_path / "b") / "config.yaml").write_text("algo: [")
    (tmp_path / "manifest.json").write_text("{")
    code, _, err = report(tmp_path)
    assert code == 0
    for text in ("b: is damaged and ignored", "manifest.json: is damaged", "nothing to plot yet", "is still running"):
        assert text in err
        assert text in parsed(tmp_path / "report.html").text("p")


def test_a_manifest_that_is_none_is_named_and_an_empty_one_is_not(report: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "a", evaluations=[(10, 1.0), (20, 2.0)])
    (tmp_path / "manifest.json").write_text(json.dumps({"suite": "x", "tasks": [{"task": 1}]}))
    code, _, err = report(tmp_path)
    assert code == 0
    assert "the manifest is not shown" in err
    assert "the manifest is not shown" in parsed(tmp_path / "report.html").text("p")
    write_manifest(tmp_path / "manifest.json", Manifest(1, "x", []))
    assert report(tmp_path)[2] == ""
    assert "CartPole-v1" in parsed(tmp_path / "report.html").text("td"), "what its runs say themselves"


def test_a_profile_is_a_table(report: Any, tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", evaluations=[(10, 1.0)])
    parts = [{"name": "env", "calls": 2000, "seconds": 4.0, "own_seconds": 3.0}, "odd", {"name": "none"}]
    (path / "profile.json").write_text(json.dumps({"wall_seconds": 12.0, "parts": parts}))
    assert report(path)[0] == 0
    cells = parsed(path / "report.html").text("td").splitlines()
    place = cells.index("env")
    assert cells[place : place + 4] == ["env", "3.00", "25.0%", "2,000"]


def test_what_cannot_work_is_refused(report: Any, suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there are no runs in" in refused(report(tmp_path))
    assert "does not exist" in refused(report(tmp_path / "nowhere"))
    assert "is not a directory" in refused(report(suite / "ppo-0" / "config.yaml"))
    assert "there are no runs in" in refused(report(suite / "ppo-0" / "checkpoints"))
    assert "must end in .html" in refused(report(suite / "ppo-0", "--output", tmp_path / "page.pdf"))
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(report(suite / "ppo-0", "--output", tmp_path / "file" / "page.html"))
    monkeypatch.setattr(curves, "find_spec", lambda name: None)
    assert "pip install '.[plot]'" in refused(report(suite / "ppo-0"))


def test_curves_of_training_episodes_are_dashed(report: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "a", evaluations=[(10, 1.0), (20, 2.0)])
    run = run_result(0, 50.0, evaluations=None, training_returns=[(100, None), (500, 20.0), (1000, 40.0)])
    write_manifest(tmp_path / "manifest.json", Manifest(1, "mine", [task_result("ppo/cartpole", run)]))
    assert report(tmp_path)[0] == 0
    (line,) = parsed(tmp_path / "report.html").charts[0]["traces"]
    assert line["line"]["dash"] == "dash"
    assert line["y"][-1] == pytest.approx(0.4), "of a hundred"
