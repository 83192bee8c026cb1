"""What a person sees of a run.

`records/` writes and reads what was recorded, `views/` shows it: a page, curves, Markdown, the terminal, a notebook, a
model card. `sink.py` joins them while a run goes on. `tables.py` is for tables of completions that trackers show.
"""
