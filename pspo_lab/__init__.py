"""Look at runs and plan them: view, report, sweep, compare, findings, plan; code rewards in a sandbox."""
