"""The command `vgr-trl`: parse, call, print.

Read `__main__.py` (the table of commands), `arguments.py` (options and how they are read), `loading.py` (models, data),
then `train.py` with `plan.py` (what a run is going to do, and `--dry_run`), or `evaluate.py`. `easyr1.py` turns
configurations of EasyR1, MTRL and verl into flags; `data.py` and `report.py` stand alone.
"""
