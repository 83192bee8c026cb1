"""What stands on a command line.

Read `names.py` (misspelt flags, before torch is imported), `config_file.py`, `arguments.py` and `evaluation.py` (flags
that are no options of the trainer), `parsing.py`, `advice.py` and `help.py`.
"""
