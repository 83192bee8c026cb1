"""Data sets: found, read, understood, prepared for training, converted to one schema, inspected.

`load.py` reads files, folders and the hub; `read_row.py` understands a row, `images.py` opens its images and videos,
`prompts.py` writes its prompt and `lengths.py` counts its tokens; `rows.py` prepares data sets for training.
`convert.py`, `merge.py` and `public_sets.py` make sets of one schema, and `inspect.py` checks a set.
"""
