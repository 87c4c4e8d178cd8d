"""The command line: switches, files, calls from Python."""
