"""A data set looked at before training: `rows.py`, `lengths.py`, `sample.py`, shown by `report.py` and `page.py`."""
