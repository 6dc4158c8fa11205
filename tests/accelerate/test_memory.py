"""Freed memory is kept for the next gradient step."""

import ctypes
import platform
import resource

import pytest
import torch

from rl_training.accelerate import memory

MEGABYTES = 16


def faults_of_making_tensors():
    """Pages that the operating system has to provide while pieces of memory are made and freed, several at a time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        pieces = [torch.zeros(MEGABYTES << 18) for _ in range(3)]
        del pieces
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_memory_is_not_asked_for_again():
    memory.keep_memory.cache_clear()
    assert memory.keep_memory()
    faults_of_making_tensors()
    pages = 3 * (MEGABYTES << 20) // resource.getpagesize()
    assert faults_of_making_tensors() < pages  # once at most, not twenty times


def test_other_systems_are_left_alone(monkeypatch):
    memory.keep_memory.cache_clear()
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("looked for a library"))
    assert not memory.keep_memory()
    memory.keep_memory.cache_clear()


def test_a_c_library_without_the_call_is_left_alone(monkeypatch):
    memory.keep_memory.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not memory.keep_memory()
    memory.keep_memory.cache_clear()
