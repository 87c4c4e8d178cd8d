"""Rollouts by vLLM: in a process, on servers; serve; vLLM's plugin."""
