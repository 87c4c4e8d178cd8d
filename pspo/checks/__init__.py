"""Checks before a run: the memory that it needs, and a model that computes what the trainer takes it to compute."""
