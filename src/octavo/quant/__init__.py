"""Quantisation schemes."""
