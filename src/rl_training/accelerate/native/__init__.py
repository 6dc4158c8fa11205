"""Recordings as C: what a recorded function does, compiled where there is a compiler.

A recording calls its kernels one by one from Python. Time goes into that, into passes over memory that could be one,
and into waking threads for each kernel. Here a recording is written down as C: loops over elements, those that follow
each other in one pass; sums; and products, with the bias before them and the activation after them. All threads run
through all of it and wait for each other only where one needs what another made. What has no rule here stays a call
from Python, between two pieces of C.

The numbers are the same to the bit, so it does not matter when a compiled recording takes over, or whether there is a
compiler at all: sums add in torch's order (or in numpy's, where `numpy_kernels` leaves them to it), products too, and
nothing is contracted or reordered. Before it takes over, a compiled recording must repeat a call of the recorded
kernels with equal results; else it is never used. Only whether a zero is minus zero may differ.

- `memory`: what a statement touches, and by which thread.
- `elements`: loops over elements, and which operators become such.
- `products`, `few`, `sums`: what is not done element by element; `few` are products with few columns.
- `libraries`: functions of numpy and torch that C calls itself.
- `flat`: what is done to all weights at once: Adam, targets, norms.
- `program`: a whole recording: which operators become what, where threads wait, the text.
- `compiler`: the C compiler of the machine.
- `takeover`: when a recording is compiled, and the check before that is used.
- `layers`, `convolutions`: parts of networks of images, which are not recorded.
- `kernels.h`, `kernels.c`, `convolutions.c`: sums and products in C.
"""
