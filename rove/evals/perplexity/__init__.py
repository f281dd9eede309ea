"""Perplexity by context length: `protocols` says what is scored, `run` measures and writes it."""
