"""A busy process: products of matrices in one thread, until it is killed."""

from __future__ import annotations

import numpy as np

a = np.random.default_rng(0).standard_normal((256, 256))
while True:
    a = np.tanh(a @ a)
