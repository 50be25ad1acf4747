"""The compute plane: a plan becomes a batch, a batch becomes tokens."""
