"""Compiled recordings: recorded functions translated to C, if there is a compiler.

A recording calls its kernels one by one from Python. That costs time, and so do separate passes over memory and waking
threads for each kernel. Here a recording is translated to C: elementwise loops, fused where they follow each other;
sums; and matrix products, fused with their bias and activation. All threads run the whole program and wait for each
other only where one needs another's results. Operators without a rule here stay Python calls between two C segments.

Results are bit-identical, so it does not matter when a compiled recording replaces the recorded kernels, or whether
there is a compiler at all: sums and products use torch's order of summation (or numpy's, where `numpy_kernels` uses
numpy), and nothing is contracted or reordered. Before it is used, a compiled recording must repeat a call of the
recorded kernels with equal results; otherwise it is discarded. Only the sign of a zero may differ.

- `memory`: the memory that a statement accesses, per thread.
- `elements`: elementwise loops and operators.
- `products`, `few`, `sums`: operators that are not elementwise; `few` is for products with few columns.
- `libraries`: functions of numpy and torch that C calls directly.
- `flat`: operations on all weights at once: Adam, target updates, norms.
- `program`: a whole recording: the translation of operators, the barriers between threads, the source text.
- `compiler`: runs the C compiler.
- `takeover`: when a recording is compiled, and the check before it is used.
- `layers`, `convolutions`: layers of image networks, which are not recorded.
- `kernels.h`, `kernels.c`, `convolutions.c`: sums, products and convolutions in C.
"""
