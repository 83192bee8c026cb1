"""What surrounds a run of `vgr-trl train`.

Read `folder.py` (whose it is), `building.py` (the trainer that flags describe), `evaluated.py` (what is evaluated on),
`describe.py` (told beforehand), `dry_run.py`, `step_lines.py` and `last_evaluation.py`.
"""
