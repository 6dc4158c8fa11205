"""MLflow, behind the `mlflow` setting and extra."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_training.contracts.errors import MissingExtraError
from rl_training.experiment.files import MAX_WAITING, Outage

EXPERIMENT = "rl-training"
RUN_TAG = "rl_training.run_id"
STORE, ARTIFACTS = "mlflow.db", "mlartifacts"
MAX_METRICS = 1000
"""Maximum number of metrics per MLflow request."""
MAX_VALUE = 500
"""Maximum length of a parameter value that every MLflow store accepts."""


def require_mlflow() -> None:
    """Raise an error before training if MLflow or its database backend is not installed."""
    if any(find_spec(name) is None for name in ("mlflow", "sqlalchemy", "alembic")):
        raise MissingExtraError("the mlflow setting", "mlflow")


class MlflowLogger:
    """Sends scalars to one MLflow run, named like the run directory; a resumed run continues the same MLflow run.

    MLflow's own variables (`MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`) set the destination; by default it is a
    database beside the run directory, so that nothing leaves the machine.
    """

    def __init__(self, directory: Path, config: dict[str, Any], run_id: str, about: Mapping[str, Any]) -> None:
        require_mlflow()
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # MLflow sends usage data otherwise
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # logs every table it creates
        home = directory.resolve().parent
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home / STORE}")
        experiment = self._experiment(home)
        found = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run_id}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            tags = {RUN_TAG: run_id, **_tags(about)}
            self._run = self._client.create_run(experiment, run_name=directory.resolve().name, tags=tags).info.run_id
            self._log_parameters(config)
        self._logged = self._last_steps(found[0].data.metrics if found else {})
        self._waiting: list[Any] = []
        self._outage = Outage("the MLflow run")

    def _experiment(self, home: Path) -> str:
        from mlflow.exceptions import MlflowException

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        own = not os.environ.get("MLFLOW_TRACKING_URI")
        place = str(home / ARTIFACTS) if own else None  # MLflow's default is the working directory
        known = self._client.get_experiment_by_name(name)
        if known is None:
            try:
                return str(self._client.create_experiment(name, artifact_location=place))
            except MlflowException:  # created by another run in the meantime
                known = self._client.get_experiment_by_name(name)
                if known is None:
                    raise
        return str(known.experiment_id)

    def _log_parameters(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        parameters = [Param(_name(key), str(value)[:MAX_VALUE]) for key, value in _leaves(config)]
        for start in range(0, len(parameters), 100):  # MLflow's limit per request
            self._client.log_batch(self._run, params=parameters[start : start + 100])

    def _last_steps(self, metrics: Mapping[str, float]) -> dict[str, int]:
        """The last logged step of each metric: a resumed run repeats steps, and MLflow would keep both."""
        histories = {name: self._client.get_metric_history(self._run, name) for name in metrics}
        return {name: max(point.step for point in points) for name, points in histories.items() if points}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        named = {_name(key): value for key, value in metrics.items() if key != "global_step"}
        new = {name: value for name, value in named.items() if step > self._logged.get(name, -1)}
        self._waiting += [Metric(name, value, now, step) for name, value in new.items()]
        self._send()

    def _send(self) -> None:
        """Send queued metrics; if the store fails (full disk, no network), they are sent with the next ones."""
        from mlflow.exceptions import MlflowException

        try:
            while self._waiting:
                self._client.log_batch(self._run, metrics=self._waiting[:MAX_METRICS])
                del self._waiting[:MAX_METRICS]
        except MlflowException as error:
            self._waiting = self._waiting[-MAX_WAITING:]
            reason = str(error).splitlines()[0]
            self._outage.began(reason, f"up to {MAX_WAITING} values are kept in memory and sent again later")
        else:
            self._outage.ended()

    def close(self) -> None:
        """See `Logger.close`."""
        from mlflow.exceptions import MlflowException

        failed = sys.exc_info()[0] is not None
        self._send()
        try:
            self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")
        except MlflowException as error:
            self._outage.began(str(error).splitlines()[0], "its end is not recorded in MLflow")


def _tags(about: Mapping[str, Any]) -> dict[str, str]:
    """Versions and the git commit, the latter under the tag that MLflow displays."""
    tags = {f"version.{name}": str(version) for name, version in about.get("versions", {}).items()}
    commit = about.get("git_commit")
    return {**tags, "mlflow.source.git.commit": str(commit)} if commit else tags


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The config's values under dotted names: `algorithm.gamma`."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _name(name: str) -> str:
    """A name without the characters that MLflow refuses.

    Example:
        >>> _name("loss/policy"), _name("share (%)")
        ('loss/policy', 'share ___')
    """
    return re.sub(r"[^\w\-. :/]", "_", name)
