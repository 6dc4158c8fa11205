"""What families of algorithms share. Algorithms themselves are the modules of the package above."""
