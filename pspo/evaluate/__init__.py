"""Evaluate a model: ``python -m pspo.evaluate``."""
