"""An algorithm, an encoder and a preset for rl_training."""
