"""Many runs from one file: ``python -m pspo.sweep``."""
