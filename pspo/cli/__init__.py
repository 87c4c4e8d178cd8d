"""The command line: parsing and messages."""
