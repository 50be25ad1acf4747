"""Modules under the names that vLLM gives them, for commands that name a module."""
