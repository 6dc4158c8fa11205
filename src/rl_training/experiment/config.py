"""The configuration of a run: one typed dataclass, read from and written to YAML without loss."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_training.accelerate import Mode, mode_problem
from rl_training.algorithms.registry import get_spec
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.settings import documented, setting
from rl_training.contracts.spec import AlgorithmConfig, AlgorithmSpec, Regime
from rl_training.data.processing import DataConfig
from rl_training.data.settings import OffPolicyConfig
from rl_training.envs.atari import PREFIX, AtariConfig, is_atari
from rl_training.envs.factory import Vectorization, module_of
from rl_training.envs.wrappers import WrapperConfig, wrapper_problem
from rl_training.experiment.logging.base import LoggerConfig
from rl_training.experiment.schema import INVALID, build, convert_fields, default_of, to_plain, valid_part
from rl_training.experiment.yaml_io import dump_yaml, read_yaml
from rl_training.runtime.distributed.settings import WorkersConfig

EVAL_MAX_STEPS = 10_000
"""Default of `eval_max_steps`."""


@documented
@dataclass
class TrainConfig:
    """All settings of a run.

    Example:
        >>> TrainConfig(algo="ppo", env_id="CartPole-v1", seed=7).algorithm.gamma
        0.99
    """

    algo: str = setting(help="Algorithm, in lower case: ppo, sac, dqn, ...")
    env_id: str = setting(help="Gymnasium environment id; empty for learning from recorded data without one.")
    seed: int = setting(0, "Seed of all random streams of the run.", ge=0)
    total_timesteps: int = setting(100_000, "Environment steps to train for, counted over all environments.", ge=1)
    dataset: str | None = setting(
        None,
        "Recorded data: a file (.npz, .hdf5, .parquet), a saved replay, or minari:<id>. With total_updates the run "
        "learns from it alone (offline); otherwise part of each batch comes from it.",
        added_later=True,
    )
    total_updates: int = setting(
        0, "Gradient steps of the offline phase; 0 for algorithms that learn online.", ge=0, added_later=True
    )
    online: bool = setting(False, "Continue online after an offline phase; set by `resume --online`.", added_later=True)
    data: DataConfig = setting(factory=DataConfig, help="Processing of recorded data.", added_later=True)
    num_envs: int = setting(
        None, "Number of parallel environments; the default depends on the algorithm.", ge=1, le=65_536
    )
    output_dir: Path = setting(Path("runs"), "Directory in which the run directory is created.")
    device: str = setting("auto", "Torch device: auto (a GPU if available), cpu, cuda, cuda:1, mps.")
    num_threads: int | None = setting(
        None,
        "Threads torch may use inside one operation; by default one, the fastest for small networks, or for large ones "
        "and images as many as torch would take (at most 8).",
        ge=1,
        le=1_024,
    )

    accelerate: Mode = setting(
        "auto",
        "Acceleration of updates and acting: auto, off (plain torch, for debugging), recorded (never compiles), "
        "compiled (compiles at the start and waits for it).",
        added_later=True,
    )
    init_from: Path | None = setting(
        None, "Checkpoint or run directory whose weights and normalisation statistics the new run starts with."
    )

    env_kwargs: dict[str, Any] = setting(factory=dict, help="Keyword arguments of the environment.")
    wrappers: list[WrapperConfig] = setting(factory=list, help="Registered wrappers, innermost first.")
    vectorization: Vectorization = setting(
        None,
        "sync (one process), async (one process per environment), native (the environment's own vector version); "
        "by default native for Atari games without wrappers, otherwise sync.",
    )
    atari: AtariConfig = setting(factory=AtariConfig, help="Atari.")
    env_timeout: float = setting(
        300.0,
        "Time limit in seconds for one step or reset of an environment worker (vectorization: async), and for one "
        "rollout of a worker.",
        gt=0,
    )
    workers: WorkersConfig = setting(factory=WorkersConfig, help="Workers that collect experience.", added_later=True)
    action_masks: bool = setting(False, "Mask invalid actions, using obs['action_mask'] or info['action_mask'].")
    normalize_obs: bool = setting(False, "Normalise float observations by their running mean and standard deviation.")
    normalize_reward: bool = setting(
        False, "Divide rewards by the running standard deviation of the discounted return."
    )
    normalize_clip: float = setting(10.0, "Clip range of normalised observations and rewards.", gt=0)

    eval_every: int = setting(25_000, "Environment steps between evaluations; 0 to not evaluate.", ge=0)
    eval_episodes: int = setting(10, "Episodes per evaluation during training.", ge=1, le=1_000_000)
    eval_deterministic: bool = setting(True, "Evaluate with deterministic actions instead of sampled ones.")
    eval_epsilon: float = setting(0.0, "Probability of a random action in evaluations.", ge=0, le=1)
    eval_max_steps: int = setting(
        None,
        "An evaluation episode is truncated after this many steps, so that evaluations end without a time limit; by "
        "default 10,000, or the limit of an Atari game if that is longer.",
        ge=1,
        added_later=True,
    )
    checkpoint_every: int = setting(25_000, "Environment steps between checkpoints; 0 for only the last.", ge=0)
    checkpoint_keep: int = setting(3, "Number of newest checkpoints to keep.", ge=1)
    checkpoint_best: bool = setting(True, "Also keep the checkpoint with the best evaluation, in checkpoints/best.")
    stop_reward: float | None = setting(None, "Stop when the mean return of an evaluation reaches this value.")
    stop_patience: int | None = setting(None, "Stop after this many evaluations without a new best mean return.", ge=1)
    max_seconds: float | None = setting(None, "Stop after this many seconds of training.", gt=0)
    video_every: int = setting(0, "Environment steps between recorded videos; 0 to not record.", ge=0)

    log_every: int = setting(1_000, "Environment steps between log entries.", ge=1)
    tensorboard: bool = setting(True, "Write TensorBoard files.")
    wandb: bool = setting(False, "Log to Weights & Biases (extra `wandb`).")
    mlflow: bool = setting(
        False, "Log to MLflow (extra `mlflow`): to MLFLOW_TRACKING_URI if set, otherwise to output_dir/mlflow.db."
    )

    loggers: list[LoggerConfig] = setting(factory=list, help="Additional loggers, by their registered names.")

    algorithm: AlgorithmConfig = setting(None, "Settings of the algorithm.")

    def __post_init__(self) -> None:
        """Check and convert every field; fill in defaults that depend on the algorithm."""
        problems: list[str] = []
        self._finish(lambda name: type(self).__name__, problems)
        if problems:
            raise ConfigError(problems)

    def _finish(self, source: Callable[[str], str], problems: list[str], *, combinations: bool = True) -> None:
        """Convert and complete all fields. `source` says where a field was set; invalid values become the default."""
        spec = None
        if isinstance(self.algo, str):
            try:
                spec = get_spec(self.algo)
            except ConfigError as error:
                problems += [f"{source('algo')} > {text}" for text in error.problems]
        unset: object = dataclasses.MISSING
        if self.env_id is unset and self.dataset is not None:
            self.env_id = ""
        if self.num_envs is None:
            self.num_envs = spec.default_num_envs if spec else 1
        if self.vectorization is None:
            known = isinstance(self.env_id, str) and isinstance(self.env_kwargs, dict)
            native = known and is_atari(self.env_id, self.env_kwargs) and not self.wrappers and not self.env_kwargs
            self.vectorization = "native" if native else "sync"
        if self.eval_max_steps is None:
            self.eval_max_steps = self._default_eval_max_steps()
        self._convert([field.name for field in dataclasses.fields(self)], spec, source, problems)
        if combinations or problems:
            self._check_combinations(source, problems)
        self._share_envs()

    def _share_envs(self) -> None:
        """The total number of environments, if workers have them."""
        if self.workers.count:
            each = self.workers.envs_per_worker or -(-self.num_envs // self.workers.count)
            self.num_envs = self.workers.count * each

    def _default_eval_max_steps(self) -> int:
        known = isinstance(self.env_id, str) and isinstance(self.env_kwargs, dict)
        if not (known and is_atari(self.env_id, self.env_kwargs)):
            return EVAL_MAX_STEPS
        atari = build(AtariConfig, self.atari, "atari", [])
        game = 0 if atari is INVALID else math.ceil(atari.max_frames / atari.frame_skip)
        return max(EVAL_MAX_STEPS, game)

    def _convert(
        self, names: Collection[str], spec: AlgorithmSpec | None, source: Callable[[str], str], problems: list[str]
    ) -> None:
        """Convert fields to their declared types; an invalid value becomes the default."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in names or field.name == "algorithm" or value is dataclasses.MISSING:
                continue
            valid = convert_fields(TrainConfig, {field.name: value}, source(field.name), problems)
            setattr(self, field.name, valid.get(field.name, default_of(field)))
        if spec is not None and "algorithm" in names:
            algorithm = {} if self.algorithm is None else self.algorithm
            self.algorithm = build(spec.config, algorithm, f"{source('algorithm')} > algorithm", problems)

    def _check_combinations(self, source: Callable[[str], str], problems: list[str]) -> None:
        problems += [f"{source(text.partition(':')[0])} > {text}" for text in self.problems()]

    def problems(self) -> list[str]:
        """Combinations of settings that cannot work."""
        found = [f"wrappers: {text}" for w in self.wrappers if (text := wrapper_problem(w.name))]
        if self.vectorization == "native" and self.wrappers:
            found.append("vectorization: native environments do not support wrappers; use sync or async")
        if self.eval_every == 0:
            found += [
                f"{name}: needs evaluations, but eval_every is 0; set eval_every"
                for name in ("stop_reward", "stop_patience")
                if getattr(self, name) is not None
            ]
        if problem := mode_problem(self.accelerate):
            found.append(f"accelerate: {problem}")
        if isinstance(self.env_id, str) and self.env_id:
            found += self._atari_problems()
        return found + self._data_problems() + self._workers_problems()

    def _workers_problems(self) -> list[str]:
        """Settings that do not work together with workers."""
        workers, settings = self.workers, self.algorithm
        if not workers.count:
            return []
        found = []
        if workers.mode == "async" and (self.normalize_obs or self.normalize_reward):
            found.append(
                "workers: with mode async, workers would normalise with statistics of different times; use mode sync "
                "or pipelined, or switch normalize_obs and normalize_reward off"
            )
        if isinstance(settings, OffPolicyConfig):
            names = [name for name in ("her", "sampler", "prior_replay") if getattr(settings, name)]
            found += [f"workers: cannot be combined with {name}; set workers.count to 0" for name in names]
        if self.dataset is not None and self.env_id:
            found.append("workers: cannot be combined with a dataset; set workers.count to 0")
        return found

    def _data_problems(self) -> list[str]:
        """Problems of the choice between recorded data and an environment."""
        if not (isinstance(self.algo, str) and isinstance(self.env_id, str)):
            return []  # reported before
        try:
            regimes = get_spec(self.algo).regimes
        except ConfigError:  # reported before
            return []
        found = []
        if self.env_id == "" and (self.dataset is None or Regime.OFFLINE not in regimes):
            found.append("env_id: must not be empty")
        elif self.regime is Regime.OFFLINE:
            if Regime.OFFLINE not in regimes:
                found.append(f"total_updates: {self.algo} cannot learn from recorded data alone; leave it at 0")
            if self.normalize_reward:
                found.append("normalize_reward: is for rewards that are collected; use data.reward_preset")
        if self.online and Regime.OFF_POLICY not in regimes:
            found.append(f"online: {self.algo} learns from recorded data only")
        elif self.regime is Regime.ON_POLICY and self.dataset is not None:
            found.append(f"dataset: {self.algo} cannot mix recorded data into its batches")
        return found

    def training_problems(self) -> list[str]:
        """What is missing to start training, though the settings are enough to make the agent."""
        if self.regime is not Regime.OFFLINE:
            return (
                ["env_id: is empty; training online needs an environment: give --env-id"] if self.env_id == "" else []
            )
        found = []
        if self.total_updates == 0:
            found.append(f"total_updates: {self.algo} learns from recorded data: give the number of gradient steps")
        if self.dataset is None:
            found.append(f"dataset: {self.algo} learns from recorded data: give a file or minari:<id>")
        return found

    @property
    def budget(self) -> int:
        """The length of the current phase: environment steps, or gradient steps on recorded data."""
        return self.total_updates if self.regime is Regime.OFFLINE else self.total_timesteps

    @property
    def regime(self) -> Regime:
        """Where the data comes from in the current phase of the run."""
        online = [regime for regime in get_spec(self.algo).regimes if regime is not Regime.OFFLINE]
        offline = not self.online and (self.total_updates > 0 or self.env_id == "")
        return Regime.OFFLINE if offline or not online else online[0]

    def _atari_problems(self) -> list[str]:
        default = AtariConfig()
        changed = [
            f.name for f in dataclasses.fields(default) if getattr(self.atari, f.name) != getattr(default, f.name)
        ]
        if not changed or is_atari(self.env_id, self.env_kwargs):
            return []
        other = "with env_kwargs obs_type does not use them" if self.env_id.startswith(PREFIX) else "is not one"
        return [f"atari: {', '.join(changed)}: settings of Atari games (ALE/...), but '{self.env_id}' {other}"]

    def to_dict(self) -> dict[str, Any]:
        """The config as plain data: every field with its resolved value."""
        data = to_plain(self)
        assert isinstance(data, dict)
        return data

    def to_yaml(self) -> str:
        """The config as YAML text; `from_dict(parse)` gives an equal config."""
        return dump_yaml(self.to_dict())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config") -> TrainConfig:
        """A config from plain data; problems name the source."""
        return resolve([Layer(dict(data), source)])

    def replace(self, **changes: Any) -> TrainConfig:
        """A copy with some fields changed. See `updated`."""
        return self.updated(changes)

    def updated(
        self,
        changes: Mapping[str, Any],
        source: str = "TrainConfig",
        base: Callable[[str], str] = lambda name: "TrainConfig",
    ) -> TrainConfig:
        """A copy with a layer of changes on top, merged as in `resolve`.

        Only the changes are checked, and whether all settings work together. Problems name `source` for changed fields
        and `base(field)` for the others.
        """
        problems: list[str] = []
        algo = changes.get("algo", self.algo)
        spec = None
        try:
            spec = get_spec(algo)
        except ConfigError as error:
            problems += [f"{source} > {text}" for text in error.problems]
        valid = _valid_part(Layer(changes, source), algo, problems)
        names = {*valid, "algorithm"} if algo != self.algo else set(valid)
        before = {name: to_plain(getattr(self, name)) for name in names}
        config = self.derived(**merge(before, valid))

        def source_of(name: str) -> str:
            return source if name in changes else base(name)

        config._convert(names, spec, source_of, problems)
        config._check_combinations(source_of, problems)
        if problems:
            raise ConfigError(problems)
        config._share_envs()
        return config

    def derived(self, **values: Any) -> TrainConfig:
        """A copy with values determined by the package itself, such as the number of threads; without checks."""
        config = copy.copy(self)
        for name, value in values.items():
            setattr(config, name, value)
        return config


NETWORK_LOGGERS = ("wandb", "mlflow")
"""Settings that send data over the network."""


@dataclass(frozen=True)
class Layer:
    """Settings from one source.

    Only a trusted source may name a module to import, a path for the environment, or a logger that uses the network.
    Options typed by the user are trusted; files are not, since they may come from elsewhere.
    """

    data: Mapping[str, Any]
    source: str
    trusted: bool = True


def resolve(layers: Sequence[Layer], *, combinations: bool = True) -> TrainConfig:
    """Merge layers into one config, later layers win. All problems of all layers are reported together.

    Without `combinations`, valid settings that do not work together are accepted; options given later may fix them.
    """
    problems: list[str] = []
    merged: dict[str, Any] = {}
    origin: dict[str, Layer] = {}
    for layer in layers:
        origin.update(dict.fromkeys(layer.data, layer))
    algo = origin["algo"].data["algo"] if "algo" in origin else None
    for layer in layers:
        merged = merge(merged, _valid_part(layer, algo, problems))
    everywhere = ", ".join(layer.source for layer in layers) or "config"
    required = ("algo",) if "dataset" in origin else ("algo", "env_id")
    problems += [f"{everywhere}: '{name}' is required" for name in required if name not in origin]
    if "env_id" in merged and not origin["env_id"].trusted:
        problems += module_problems(merged["env_id"], origin["env_id"].source)
    if "env_kwargs" in merged and not origin["env_kwargs"].trusted:
        problems += path_problems(merged["env_kwargs"], f"{origin['env_kwargs'].source} > env_kwargs")
    asked = [name for name in NETWORK_LOGGERS if merged.get(name) is True and not origin[name].trusted]
    problems += [logger_problem(name, origin[name].source) for name in asked]
    for layer in layers:
        if not layer.trusted:
            for name in ("algorithm", "loggers"):
                problems += nested_path_problems(layer.data.get(name), f"{layer.source} > {name}")
    config = object.__new__(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        setattr(config, field.name, merged.get(field.name, default_of(field)))
    config._finish(
        lambda name: origin[name].source if name in origin else everywhere, problems, combinations=combinations
    )
    if problems:
        raise ConfigError(problems)
    return config


def _valid_part(layer: Layer, algo: Any, problems: list[str]) -> dict[str, Any]:
    """The valid settings of one layer; invalid ones are noted with their source."""
    data = dict(layer.data)
    algorithm = data.pop("algorithm", None)
    config_type: type[AlgorithmConfig] = AlgorithmConfig
    if isinstance(algo, str):
        with contextlib.suppress(ConfigError):  # reported once, for the merged config
            config_type = get_spec(algo).config
    wrappers = data.get("wrappers")
    for item in wrappers if isinstance(wrappers, (list, tuple)) else ():
        if isinstance(item, type):
            problems.append(
                f"{layer.source} > wrappers: {item.__name__} is a class, but configs hold names: register it with "
                f"register_wrapper('{item.__name__}')({item.__name__}) from rl_training.envs.wrappers, then "
                f"wrappers=[{{'name': '{item.__name__}'}}]"
            )
            data.pop("wrappers", None)
    own = {f.name for f in dataclasses.fields(config_type)} - {f.name for f in dataclasses.fields(TrainConfig)}
    for key in own & data.keys():
        problems.append(f"{layer.source}: '{key}' is a setting of the algorithm; move it to the section 'algorithm'")
        del data[key]
    valid = valid_part(TrainConfig, data, layer.source, problems)
    if algorithm is None or config_type is AlgorithmConfig:
        return valid
    where = f"{layer.source} > algorithm"
    if isinstance(algorithm, Mapping):
        valid["algorithm"] = valid_part(config_type, algorithm, where, problems)
    elif build(config_type, algorithm, where, problems) is not INVALID:
        valid["algorithm"] = to_plain(algorithm)
    return valid


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` into `base`. Sections are merged; values, keyword arguments and schedules are replaced whole."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        section = isinstance(value, Mapping) and isinstance(old, Mapping) and not key.endswith("kwargs")
        if section and "schedule" not in value and "schedule" not in old:  # type: ignore[operator]
            merged[key] = merge(old, value)  # type: ignore[arg-type]
        else:
            merged[key] = value
    return merged


def module_problems(env_id: str, source: str) -> list[str]:
    """A file may not import code: `package:Env-v0` is accepted only from a trusted source."""
    module = module_of(env_id)
    if module is None:
        return []
    return [
        f"{source} > env_id: '{env_id}' would import the module '{module}', which files may not do by default. "
        "Import the module first, pass env_id on the command line, or add --trust (Python: trust=True)."
    ]


def nested_path_problems(value: Any, where: str) -> list[str]:
    """The same check for all keyword arguments within some settings: encoders, networks, samplers, loggers."""
    if isinstance(value, (list, tuple)):
        return [problem for item in value for problem in nested_path_problems(item, where)]
    if not isinstance(value, Mapping):
        return []
    return [
        problem
        for key, item in value.items()
        for problem in (path_problems if str(key).endswith("kwargs") else nested_path_problems)(
            item, f"{where} > {key}"
        )
    ]


def path_problems(value: Any, where: str) -> list[str]:
    """A file may not make an environment open another file: paths are accepted only from a trusted source."""
    if isinstance(value, Mapping):
        return [problem for key, item in value.items() for problem in path_problems(item, f"{where} > {key}")]
    if isinstance(value, (list, tuple)):
        return [problem for item in value for problem in path_problems(item, where)]
    if not isinstance(value, str) or not _is_path(value):
        return []
    return [
        f"{where}: '{value}' is a local path, which files may not set by default. Pass it on the command "
        "line, or add --trust (Python: trust=True)."
    ]


def _is_path(text: str) -> bool:
    """Whether a string is a path outside the directory in which an environment looks for its files.

    Such a path starts at the root, the home or the working directory. Environments resolve every string with a leading
    dot relative to the working directory, such as `./model.xml` or `.hidden/model.xml`.
    """
    parts = text.replace("\\", "/").split("/")
    is_address = len(parts) > 1 and ":" in parts[0]  # C:/..., file://...
    return text.startswith(("/", "\\", "~")) or is_address or any(part.startswith(".") for part in parts)


def logger_problem(name: str, source: str) -> str:
    """A file may not enable a logger that sends data over the network with the user's account."""
    return (
        f"{source} > {name}: files may not enable logging over the network by default. Add --{name} or --no-{name} "
        f"on the command line (Python: {name}=True or False), or --trust (Python: trust=True)."
    )


def read_config(path: str | Path, *, trust: bool = False) -> TrainConfig:
    """A config from a complete YAML file (no preset is applied)."""
    return resolve([Layer(read_yaml(Path(path)), str(path), trusted=trust)])
