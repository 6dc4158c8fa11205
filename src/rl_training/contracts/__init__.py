"""Small types shared by every layer; this package imports nothing else from `rl_training`."""
