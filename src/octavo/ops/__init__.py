"""What a model computes with: the protocol (api), its definition (reference), its kernels (cpu)."""
