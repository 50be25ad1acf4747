"""How the weights of a model are kept: which matrices are quantised, and what their inputs are rounded to."""
