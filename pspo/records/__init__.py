"""Records: the files and folders of a run, written whole or not at all, and trackers that get the same lines."""
