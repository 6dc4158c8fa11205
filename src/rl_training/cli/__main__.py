"""`python -m rl_training.cli`."""

import sys

from rl_training.cli import main

if __name__ == "__main__":
    sys.exit(main())
