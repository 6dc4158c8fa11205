"""Policies with a memory: recurrent networks over sequences in which episodes begin and end."""
