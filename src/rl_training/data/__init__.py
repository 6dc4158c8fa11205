"""Rollout and replay buffers, samplers, and running statistics."""
