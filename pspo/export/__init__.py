"""Merge LoRA adapters into their model: ``python -m pspo.export``."""
