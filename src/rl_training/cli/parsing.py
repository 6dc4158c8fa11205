"""Parsing rules for tyro: how options are converted to the package's types."""

from __future__ import annotations

import typing
from typing import Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from rl_training.contracts.errors import ConfigError
from rl_training.contracts.schedule import Schedule
from rl_training.envs.wrappers import WrapperConfig
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.logging import LoggerConfig
from rl_training.experiment.schema import to_plain
from rl_training.experiment.yaml_io import dump_yaml, parse_yaml

T = TypeVar("T")
_REGISTRY = ConstructorRegistry()


def parse(cls: type[T], args: list[str], *, prog: str, description: str, default: T | None = None) -> T:
    """Parse arguments into a dataclass; a wrong one prints one message and exits with code 2."""
    with _REGISTRY:
        if default is None:
            return tyro.cli(cls, args=args, prog=prog, description=description)
        return tyro.cli(cls, args=args, prog=prog, description=description, default=default)


class _Options(TrainConfig):
    """A config as options; values are checked by `TrainConfig.updated`, which knows their source."""

    __doc__ = TrainConfig.__doc__

    def __post_init__(self) -> None:
        """Skip all checks."""


def parse_changes(base: TrainConfig, args: list[str], *, prog: str, description: str) -> dict[str, Any]:
    """The config fields that options change; the help shows the config's current values."""
    default = object.__new__(_Options)
    vars(default).update(vars(base))
    parsed = parse(_Options, args, prog=prog, description=description, default=default)
    return {name: value for name, value in vars(parsed).items() if value != getattr(base, name)}


def key_values(args: list[str]) -> dict[str, Any]:
    """`continuous=true gravity=-5` as a mapping; values are read as YAML."""
    pairs: dict[str, Any] = {}
    for arg in args:
        key, equals, value = arg.partition("=")
        if not equals or not key:
            raise ValueError(f"expected KEY=VALUE, got '{arg}'")
        pairs[key] = parse_yaml(value, f"command line > {key}")
    return pairs


def _whole(text: str) -> int:
    number = float(text.replace("_", ""))
    if not number.is_integer():
        raise ValueError(f"expected a whole number, got {text}")
    return int(number) if "e" in text.lower() or "." in text else int(text)


def _none(text: str) -> None:
    if text.lower() not in ("none", "null"):
        raise ValueError(f"expected none, got {text}")


def _schedule(args: list[str]) -> Any:
    try:
        return parse_yaml(args[0], "the command line")
    except ConfigError as error:
        raise ValueError(str(error)) from error


@_REGISTRY.primitive_rule
def _rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if info.type is int:  # also accepts 1e6
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT",
            instance_from_str=lambda args: _whole(args[0]),
            is_instance=lambda value: isinstance(value, int),
            str_from_instance=lambda value: [str(value)],
        )
    if info.type is type(None):  # as in a config file
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="none",
            instance_from_str=lambda args: _none(args[0]),
            is_instance=lambda value: value is None,
            str_from_instance=lambda value: ["none"],
        )
    if Schedule in typing.get_args(info.type):  # a number, or a schedule as in a config file
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="FLOAT|SCHEDULE",
            instance_from_str=_schedule,
            is_instance=lambda value: isinstance(value, (int, float, Schedule)),
            str_from_instance=lambda value: [_inline(value)],
        )
    if info.type_origin is dict:
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar="[KEY=VALUE ...]",
            instance_from_str=key_values,
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [f"{key}={_inline(item)}" for key, item in value.items()],
        )
    if info.type_origin is list and typing.get_args(info.type)[0] in (WrapperConfig, LoggerConfig):
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar="[{name: NAME, kwargs: {...}} ...]",
            instance_from_str=lambda args: [parse_yaml(arg, "the command line") for arg in args],
            is_instance=lambda value: isinstance(value, list),
            str_from_instance=lambda value: [_inline(item) for item in value],
        )
    return None


def _inline(value: Any) -> str:
    """A value as one line of YAML."""
    data = to_plain(value)
    if isinstance(data, dict):
        return "{" + ", ".join(f"{key}: {_inline(item)}" for key, item in data.items()) + "}"
    if isinstance(data, list):
        return "[" + ", ".join(_inline(item) for item in data) + "]"
    return dump_yaml({"x": data})[3:].strip()
