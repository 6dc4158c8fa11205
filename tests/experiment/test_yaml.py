"""YAML in and out: as people write it, without loss, and never able to run code."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rl_training.contracts.errors import ConfigError
from rl_training.experiment.yaml_io import dump_yaml, parse_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E-3", 1e-3),
        ("3e8", 3e8),
        ("-2.5e+4", -2.5e4),
        (".5e1", 5.0),
        ("1_000e2", 100_000.0),
        ("100_000", 100_000),
        ("-1_000", -1000),
        ("+7", 7),
        ("0", 0),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.5", -0.5),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("none", None),
    ],
)
def test_numbers_and_words_are_read_as_people_mean_them(text: str, value: Any) -> None:
    read = parse_yaml(f"x: {text}", "test")["x"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "text", ["on", "off", "yes", "no", "y", "1:30", "007", "0x1f", "2024-01-01", "v1e", "e3", "1e"]
)
def test_what_only_yaml_1_1_takes_for_something_else_is_a_string(text: str) -> None:
    assert parse_yaml(f"x: {text}", "test")["x"] == text


LOOK_ALIKES = [
    *("1e-3", "100_000", "3", "-3", "+3", "0.5", ".5", "1.", ".inf", "-.inf", ".nan", "true", "False", "null", "~"),
    *("none", "None", "", " ", " padded ", "on", "yes", "1:30", "007", "0x1f", "2024-01-01", "<<", "=", "-", "?", "*a"),
    *("&a", "!tag", "%x", "@x", "`x", "# no comment", "a: b", "a #b", "[1]", "{a: 1}", "'q'", '"q"', "two\nlines"),
    *("tab\there", "ünïcode", "日本", "\u2028", "trailing\n", "C:\\path", "a" * 300),
]


@pytest.mark.parametrize("text", LOOK_ALIKES)
def test_strings_stay_strings(text: str) -> None:
    data = {"value": text, "list": [text, text], "nested": {"value": text}}
    assert parse_yaml(dump_yaml(data), "test") == data


@pytest.mark.parametrize("key", [key for key in LOOK_ALIKES if len(key) < 100])
def test_keys_stay_strings(key: str) -> None:
    assert parse_yaml(dump_yaml({key: 1}), "test") == {key: 1}


@pytest.mark.parametrize("number", [0, -1, 10**20, 0.1, 1e-5, 1e16, 1e300, 5e-324, 1 / 3, -0.0, math.inf, -math.inf])
def test_numbers_survive_with_their_type(number: float) -> None:
    read = parse_yaml(dump_yaml({"x": number}), "test")["x"]
    assert read == number
    assert type(read) is type(number)
    assert math.copysign(1, read) == math.copysign(1, number)


def test_nan_survives() -> None:
    assert math.isnan(parse_yaml(dump_yaml({"x": math.nan}), "test")["x"])


def test_order_and_nesting_survive_and_repeated_values_have_no_anchors() -> None:
    shared = {"b": [1, [2, {"c": None}]], "a": True}
    data = {"z": shared, "a": shared, "empty": {}, "none": [], "m": [shared]}
    text = dump_yaml(data)
    assert "&" not in text
    assert "*" not in text
    read = parse_yaml(text, "test")
    assert read == data
    assert list(read) == ["z", "a", "empty", "none", "m"]
    assert list(read["z"]) == ["b", "a"]


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3\n", "x:\n  a: 1\n  a: 1\n", "{a: 1, a: 2}"])
def test_duplicate_keys_are_errors(text: str) -> None:
    with pytest.raises(ConfigError, match=r"my\.yaml: .*duplicate key 'a'"):
        parse_yaml(text, "my.yaml")


def test_a_duplicate_key_is_reported_with_its_line() -> None:
    with pytest.raises(ConfigError, match="line 3"):
        parse_yaml("a: 1\nb: 2\na: 3\n", "my.yaml")


@pytest.mark.parametrize("text", ["a: &x [1]\nb: *x", "base: &b {x: 1}\nhere: {<<: *b}", "&a [*a]"])
def test_aliases_are_refused_with_their_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"my\.yaml: .*alias.*repeat the value instead at line \d"):
        parse_yaml(text, "my.yaml")


def test_nesting_has_a_limit() -> None:
    assert parse_yaml("[" * 40 + "]" * 40, "my.yaml")
    with pytest.raises(ConfigError, match=r"my\.yaml: .*nested more than 50 deep"):
        parse_yaml("[" * 60 + "]" * 60, "my.yaml")


@pytest.mark.parametrize("tag", ["binary", "timestamp", "set", "omap", "pairs", "merge"])
def test_only_plain_data_has_tags(tag: str) -> None:
    with pytest.raises(ConfigError, match="could not determine a constructor"):
        parse_yaml(f"a: !!{tag} x", "my.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "x: !!python/object/apply:os.system ['echo no']",
        "x: !!python/name:os.system",
        "x: !!python/object:pathlib.Path {}",
        "!!python/module:antigravity x",
    ],
)
def test_nothing_can_be_made_to_run(text: str) -> None:
    with pytest.raises(ConfigError, match=r"evil\.yaml: not valid YAML"):
        parse_yaml(text, "evil.yaml")


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "\ta: 1", "a: *unknown", "a: 1\n---\nb: 2", "? [x]\n: 1"])
def test_what_is_not_yaml_is_one_error_that_names_the_file(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "broken.yaml")
    assert str(caught.value).startswith("broken.yaml: not valid YAML")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "what"), [("- a\n- b\n", "list"), ("just words", "str"), ("1: x", "dict")])
def test_a_config_file_is_a_mapping_from_names(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"a config is a mapping from names to values, got {what}") as caught:
        read_yaml(path)
    assert str(path) in str(caught.value)


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("# only a comment\n")
    assert read_yaml(path) == {}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_yaml(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_yaml(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match=r"binary\.yaml: cannot be read: not a text file"):
        read_yaml(tmp_path / "binary.yaml")
