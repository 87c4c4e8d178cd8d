"""Many runs from one file: ``pspo sweep``."""
