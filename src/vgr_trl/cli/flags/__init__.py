"""What stands on a command line.

Read `argv.py` (flags before any parser), `names.py` (misspelt flags, before torch is imported), `config_file.py`,
`recipe.py`, `plugins.py` and `foreign.py` (what a file, a recipe, a plug-in and another trainer add), `arguments.py`,
`reward_files.py` and `evaluation.py` (flags that are no options of the trainer), `parsing.py`, `kinds.py` (values of a
file), `advice.py` and `help.py`.
"""
