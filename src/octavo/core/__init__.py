"""The control plane: who gets how many tokens and which blocks. Integers only, standard library only."""
