"""Callbacks of a run: the line of a step, SIGTERM, non-finite updates, trackers."""
