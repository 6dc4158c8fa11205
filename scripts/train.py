"""Train from a checkout without installing the command: `python scripts/train.py ppo CartPole-v1`."""

import sys

from rl_training.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
