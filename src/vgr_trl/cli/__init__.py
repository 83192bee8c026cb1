"""The command `vgr-trl`: parse flags, call the library, print.

Start with `__main__.py` (the table of commands) and `arguments.py` (options, YAML files, loading of data and models).
`train.py` (also `--dry_run`), `evaluate.py` and `data.py` are the commands that need more than a function.
"""
