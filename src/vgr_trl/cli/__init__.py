"""The command `vgr-trl`: parse, call, print; one file, or folder, per subcommand.

Read `__main__.py`, then `flags/` (what stands on a command line), `loading.py`, and `train.py` with `run/` (what
surrounds a run). The other commands stand alone.
"""
