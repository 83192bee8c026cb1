"""What a person sees of a run.

`records/` writes and reads what was recorded, `views/` shows it: a page, curves, Markdown, the terminal, a notebook, a
model card. `sink.py` joins them while a run goes on; `signs.py` tells a run that collapses, `metric_names.py` what
others call the metrics.
"""
