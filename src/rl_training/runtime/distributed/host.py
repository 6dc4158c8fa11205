"""The program of a worker process: `python -m rl_training.runtime.distributed.host <pipe> <training process>`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import types
from multiprocessing.connection import Connection

WATCH_SECONDS = 0.5


def _pass_over(number: int, frame: types.FrameType | None) -> None:
    """Do nothing: the training process gets the signals of its group too, saves, and ends its workers."""


def _end_with(main_process: int) -> None:
    while os.getppid() == main_process:
        time.sleep(WATCH_SECONDS)
    os._exit(1)


def main() -> None:
    """Serve the fleet at the other end of the pipe."""
    pipe, main_process = Connection(int(sys.argv[1])), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _pass_over)
    threading.Thread(target=_end_with, args=(main_process,), daemon=True).start()

    import torch

    from rl_training.runtime.distributed.backends import serve

    torch.set_num_threads(1)
    serve(pipe)


if __name__ == "__main__":
    main()
