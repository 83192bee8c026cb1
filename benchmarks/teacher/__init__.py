"""A teacher that sees more: one digit somewhere in a noisy picture, which the start reads only in a crop.

Read `task.py` (the pictures), `runs.py` (one model, trained by one method), then `__main__.py` (missing runs, and the
page).
"""
