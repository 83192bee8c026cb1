"""The command `vgr-trl`: parse, call, print; one file, or folder, per subcommand.

Read `__main__.py` with `once.py`, then `flags/` (what stands on a command line), `loading.py`, and `train.py` with
`run/` (what surrounds a run). `evaluate.py` has its table in `evaluation_table.py`; `data/`, `report.py`, `demo.py`,
`recipes.py`, `init.py`, `env.py` and `completion.py` stand alone.
"""
