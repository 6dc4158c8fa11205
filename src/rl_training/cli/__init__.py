"""The command line, `rl-training`; `COMMANDS` lists its commands.

This module imports neither torch nor anything else that is slow; each command imports what it needs.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_training.contracts.errors import RLTrainingError
from rl_training.contracts.text import printable
from rl_training.version import __version__

if TYPE_CHECKING:
    from rl_training.experiment.config import TrainConfig

__all__ = ["load_config", "main"]

COMMANDS = {
    "train": "train an agent: rl-training train ppo CartPole-v1",
    "eval": "evaluate a run, a checkpoint or a trained agent of the zoo: rl-training eval zoo:ppo/CartPole-v1",
    "ope": "estimate a policy's value from recorded data, rank several: rl-training ope <path> --dataset <file>",
    "resume": "continue a run: rl-training resume <run> --total-timesteps 200000",
    "runs": "list the runs in a directory",
    "plot": "plot learning curves of runs: rl-training plot runs",
    "report": "write an HTML report of a run or a suite: rl-training report <path>",
    "zoo": "presets, trained agents, benchmark suites and results: rl-training zoo benchmark smoke",
    "data": "recorded datasets: check, info, list, convert, plot, record: rl-training data check data.npz",
    "tune": "search for better hyper-parameters: rl-training tune ppo CartPole-v1 --trials 50 --jobs 2",
    "export": "export a trained policy for deployment: rl-training export <path> --format onnx",
    "hub": "share agents on the Hugging Face Hub: rl-training hub push <path> <user/name>",
    "check-env": "check that an environment does what training expects: rl-training check-env CartPole-v1",
    "doctor": "show versions, devices and installed extras",
}

USAGE_ERROR, FAILURE = 2, 1


def load_config(path: str | Path, *, trust: bool = False) -> TrainConfig:
    """The resolved config of a YAML file: defaults < preset of its algorithm and environment < file."""
    from rl_training.experiment.config import Layer
    from rl_training.experiment.presets import resolve_with_preset
    from rl_training.experiment.yaml_io import read_yaml

    return resolve_with_preset([Layer(read_yaml(Path(path)), str(path), trusted=trust)])[0]


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit code: 0 success, 1 the run failed, 2 invalid request."""
    if argv is None:
        _leave_working_directory()
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter still flushes stdout at exit
        return FAILURE


def _leave_working_directory() -> None:
    """Remove the working directory from `sys.path`, where `python -m` and `python -c` put it.

    A library may try to import a module that is not installed, which would run a file of that name.
    """
    by_name = getattr(sys.modules["__main__"], "__spec__", None) is not None  # python -m
    if by_name and not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]
    sys.path[:] = [entry for entry in sys.path if entry]


def _main(args: list[str]) -> int:
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    if not args or args[0] in ("-h", "--help"):
        print(_help())
        return 0
    if args[0] == "--version":
        print(f"rl_training {__version__}")
        return 0
    command, rest = args[0], args[1:]
    if command not in COMMANDS:
        print(f"rl-training: unknown command '{command}'. {_nearest(command)}", file=sys.stderr)
        return USAGE_ERROR
    try:
        module = importlib.import_module(f"rl_training.cli.{command.replace('-', '_')}_command")
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code: int = module.run(rest)
        return code
    except RLTrainingError as error:
        _explain(f"rl-training {command}: {type(error).__name__}: {error}", error, debug)
        return FAILURE if getattr(error, "__notes__", ()) else USAGE_ERROR  # with notes: the run had started
    except SystemExit as error:  # the parser has printed an error or the help
        return error.code if isinstance(error.code, int) else USAGE_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"(in {where.filename}, line {where.lineno}). Add --debug for the traceback."
        _explain(f"rl-training {command} failed: {type(error).__name__}: {error} {place}", error, debug)
        return FAILURE


def _explain(text: str, error: Exception, debug: bool) -> None:
    """Print one paragraph, or the traceback with --debug. An environment's own traceback is always printed."""
    if debug:
        _say("".join(traceback.format_exception(error)).rstrip("\n"))
        return
    paragraph, _, environments_own = text.partition("\n\nTraceback")
    _say(". ".join([paragraph, *getattr(error, "__notes__", ())]))
    if environments_own:
        _say(f"\nTraceback{environments_own}")


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as one line, without source location."""
    _say(f"warning: {message}")


def _say(text: str) -> None:
    """Print to standard error without control characters: messages may quote untrusted files."""
    print(printable(text, keep="\n\t"), file=sys.stderr)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: rl-training <command> [options]",
            "",
            "Reinforcement learning with PyTorch and Gymnasium.",
            "",
            "commands:",
            *lines,
            "",
            "`rl-training <command> --help` shows a command's options; --debug adds tracebacks to errors; --version.",
        ]
    )


def _nearest(command: str) -> str:
    import difflib

    near = difflib.get_close_matches(command, COMMANDS, n=1)
    return f"Did you mean '{near[0]}'?" if near else f"Commands: {', '.join(COMMANDS)}."
