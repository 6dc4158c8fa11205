"""Export, the Hugging Face Hub, videos and profiles of trained agents and runs."""
