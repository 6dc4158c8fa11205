"""Policies: networks, action selection, exploration and parameters."""
