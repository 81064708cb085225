"""The files of a model: checks, downloads and their progress, GGUF conversion."""
