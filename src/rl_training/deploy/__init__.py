"""What is done with a trained agent or a run: export, the hub, videos, profiles."""
