"""The wheel and the sdist hold everything that the source tree does.

Both are built as a release is: the sdist from a clean copy of the tree, then the wheel from that sdist.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = PurePosixPath("src/rl_training")
PRESETS = PACKAGE / "zoo" / "presets"
SDIST_FOLDERS = ("src", "tests", "docs", "examples")
SDIST_FILES = ("Makefile", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "pyproject.toml")


def project_files() -> list[PurePosixPath]:
    """The files of the tree that git has, or would take: not the ignored ones, not the deleted ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the tree is not a git repository")
    paths = {PurePosixPath(name) for name in listed.split("\0") if name}
    return sorted(path for path in paths if (ROOT / path).is_symlink() or (ROOT / path).is_file())


def is_below(path: PurePosixPath, folder: PurePosixPath | str) -> bool:
    return path.is_relative_to(folder)


@pytest.fixture(scope="module")
def files() -> list[PurePosixPath]:
    return project_files()


@pytest.fixture(scope="module")
def presets(files: list[PurePosixPath]) -> list[PurePosixPath]:
    """The presets, as paths below the folder of presets."""
    found = [path.relative_to(PRESETS) for path in files if is_below(path, PRESETS) and path.suffix == ".yaml"]
    assert found, f"no preset below {PRESETS}"
    return found


@pytest.fixture(scope="module")
def built(files: list[PurePosixPath], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the built wheel and sdist; the path has a space, as a user's may."""
    base = tmp_path_factory.mktemp("a tree")
    tree, out = base / "source tree", base / "dist"
    for path in files:
        target = tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target, follow_symlinks=False)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    result = subprocess.run(command, cwd=base, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("rl_training-*-py3-none-any.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def wheel_names(wheel: zipfile.ZipFile) -> set[str]:
    return set(wheel.namelist())


@pytest.fixture(scope="module")
def sdist(built: Path) -> dict[str, tarfile.TarInfo]:
    """The members of the sdist, by their path below its top folder."""
    (path,) = built.glob("rl_training-*.tar.gz")
    with tarfile.open(path) as archive:
        return {member.name.partition("/")[2]: member for member in archive.getmembers()}


def test_configs_is_a_relative_link_to_the_presets() -> None:
    link = ROOT / "configs"
    if not link.is_symlink():  # an unpacked sdist has a copy in its place
        pytest.skip("configs is not a symlink here")
    assert link.readlink() == Path(PRESETS)
    assert link.is_dir()


def test_wheel_holds_every_file_of_the_package(files: list[PurePosixPath], wheel_names: set[str]) -> None:
    expected = {str(path.relative_to("src")) for path in files if is_below(path, PACKAGE)}
    assert "rl_training/py.typed" in expected
    assert expected - wheel_names == set()


def test_wheel_holds_every_preset(presets: list[PurePosixPath], wheel_names: set[str]) -> None:
    assert {f"rl_training/zoo/presets/{preset}" for preset in presets} - wheel_names == set()


def test_wheel_holds_marker_and_stubs(files: list[PurePosixPath], wheel_names: set[str]) -> None:
    stubs = {str(path.relative_to("src")) for path in files if is_below(path, PACKAGE) and path.suffix == ".pyi"}
    assert ({"rl_training/py.typed"} | stubs) - wheel_names == set()


def test_wheel_holds_the_package_alone(wheel_names: set[str]) -> None:
    strangers = {name for name in wheel_names if not name.startswith(("rl_training/", "rl_training-"))}
    assert strangers == set()


def test_wheel_has_the_console_script(wheel: zipfile.ZipFile, wheel_names: set[str]) -> None:
    (name,) = (name for name in wheel_names if name.endswith(".dist-info/entry_points.txt"))
    parser = ConfigParser()
    parser.read_string(wheel.read(name).decode())
    assert dict(parser["console_scripts"]) == {"rl-training": "rl_training.cli:main"}


def test_wheel_has_the_version_of_the_source(wheel: zipfile.ZipFile) -> None:
    scope: dict[str, str] = {}
    exec((ROOT / PACKAGE / "version.py").read_text(encoding="utf-8"), scope)
    version = scope["__version__"]
    metadata = wheel.read(f"rl_training-{version}.dist-info/METADATA").decode()
    assert f"\nVersion: {version}\n" in metadata
    assert "\nRequires-Python: >=3.11\n" in metadata


def test_sdist_holds_the_source_tree(files: list[PurePosixPath], sdist: dict[str, tarfile.TarInfo]) -> None:
    expected = {str(path) for path in files if path.parts[0] in SDIST_FOLDERS or str(path) in SDIST_FILES}
    assert set(SDIST_FILES) - expected == set()
    assert expected - sdist.keys() == set()


def test_sdist_holds_every_preset_behind_both_doors(
    presets: list[PurePosixPath], sdist: dict[str, tarfile.TarInfo]
) -> None:
    for door in (str(PRESETS), "configs"):
        names = {f"{door}/{preset}" for preset in presets}
        assert names - sdist.keys() == set()
        assert all(sdist[name].isfile() for name in names)


def test_sdist_holds_no_links(sdist: dict[str, tarfile.TarInfo]) -> None:
    assert [name for name, member in sdist.items() if member.issym() or member.islnk()] == []
