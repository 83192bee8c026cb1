"""A data set looked at before training: `findings.py`, `prompt_tokens.py`, `cost.py`, `sample.py`, shown by `tables.py`
and `page.py`.
"""
