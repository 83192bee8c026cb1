"""Rows from where they lie: `readers.py` (files), `sources.py` (folders and the hub), `tables.py` (as data sets)."""
