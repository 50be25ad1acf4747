"""vLLM's `entrypoints.openai`."""
