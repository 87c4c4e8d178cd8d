"""Start a vLLM server for --rollout.servers: ``python -m pspo.serve``."""
