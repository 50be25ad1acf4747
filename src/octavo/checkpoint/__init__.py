"""Finding and reading checkpoints: folders, GGUF files, hub ids, aliases."""
