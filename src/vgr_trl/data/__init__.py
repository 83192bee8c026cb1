"""Data sets: found, read, understood, prepared for training, converted to one schema, inspected.

`read.py` reads files, `columns.py` understands a row, `images.py` opens its images and videos, `prompts.py` writes its
prompt, `rows.py` prepares data sets for training, which `load.py` finds; `convert.py`, `merge.py` and `public_sets.py`
make sets of one schema, and `inspect.py` checks a set.
"""
