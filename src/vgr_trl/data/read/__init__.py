"""Rows from where they lie.

Read `readers.py` (files), `sources.py` (folders and the hub), `tables.py` (as data sets), `data_files.py` (a flag),
`hub.py` (names there), `cards.py` and `failures.py` (what is not read, and what cannot be).
"""
