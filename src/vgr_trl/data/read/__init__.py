"""Rows from where they lie: `load.py` for training, `sources.py` for conversion; `readers.py`, `tables.py`."""
