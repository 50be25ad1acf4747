"""The HTTP front: one file for each API family."""
