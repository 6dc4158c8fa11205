"""YAML: safe, `1e-3` and `100_000` are numbers, duplicate keys are errors, strings stay strings.

PyYAML follows YAML 1.1, where `1e-3` is a string, `on` a boolean and `1:30` ninety. Loader and dumper use the same
rules, so that a written value is read back unchanged. Aliases are refused: a few lines of them can expand to more data
than fits into memory.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from rl_training.contracts.errors import ConfigError
from rl_training.experiment.files import read_text

MAX_DEPTH = 50
"""Maximum nesting depth of a file."""

_RULES = (
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|none|None|)$", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:int", r"^[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        # each character allows only one continuation, so that matching takes linear time
        r"^(?:[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
        r"|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own class attribute
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse aliases and deep nesting, which a small file can use to exhaust memory or the stack."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            reason = f"'*{event.anchor}' is an alias; aliases are not supported, repeat the value instead"
            raise yaml.composer.ComposerError(None, None, reason, event.start_mark)  # type: ignore[arg-type]
        if self.depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"nested more than {MAX_DEPTH} deep", event.start_mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        """Write repeated values out: anchors are hard to read."""
        return True


for _tag, _pattern, _first in _RULES:
    for _cls in (_Loader, _Dumper):
        _cls.add_implicit_resolver(_tag, re.compile(_pattern), list(_first))


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in keys:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key '{key}'", key_node.start_mark)
        keys.add(key)
    return loader.construct_mapping(node, deep=True)


_PLAIN = [f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq")]
_Loader.yaml_constructors = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in (*_PLAIN, None)}
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse_yaml(text: str, source: str) -> Any:
    """Plain data from YAML text; errors name the source and the line."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of the safe loader
    except Exception as error:  # PyYAML raises arbitrary exceptions for malformed values
        kind = "" if isinstance(error, yaml.YAMLError) else f"{type(error).__name__}: "
        reason = kind + " ".join(str(error).split()).replace(' in "<unicode string>",', " at")
        raise ConfigError(f"{source}: not valid YAML: {reason}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """A mapping from a YAML file."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    data = parse_yaml(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{path}: a config is a mapping from names to values, got {type(data).__name__}")
    return data


def dump_yaml(data: dict[str, Any]) -> str:
    """Plain data as YAML, in the order given; lists of plain values on one line."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _flow_lists(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
    plain = all(not isinstance(item, (dict, list)) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=plain)


def _null(dumper: yaml.SafeDumper, data: None) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:null", "null")


_Dumper.add_representer(list, _flow_lists)
_Dumper.add_representer(type(None), _null)
