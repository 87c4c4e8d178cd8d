"""What other programs load of this package: plugins of vLLM. Light to import."""
