"""Files and wiring: configs, presets, run directories, checkpoints and logs."""
