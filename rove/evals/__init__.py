"""Evaluations: each takes a scoring function and knows nothing of the model behind it."""
