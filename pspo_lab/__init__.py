"""Look at runs and plan them: view, report, sweep, compare, findings; code rewards in a sandbox."""
