"""Tables and pictures of trainings: ``python -m pspo.report``."""
