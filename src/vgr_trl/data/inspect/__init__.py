"""A data set looked at before training: `rows.py`, `prompt_tokens.py`, `lengths.py`, `sample.py`, shown by `report.py`
and `page.py`.
"""
