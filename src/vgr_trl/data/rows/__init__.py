"""A row of the user's data, as training reads it.

Read `schema.py` (what a row needs, and why one is left out), `reading.py` and `questions.py` (what a row says),
`naming.py`, `layouts.py` and `kinds.py` (what columns are called, laid out and typed like), `text/` (how it is written
down for the model), `columns.py`, `regions.py`, `images/` (its images and videos); then `scan.py` and `lengths.py`
(looking at all rows once), `skipped.py`, `streams.py` and `repeated.py` (rows as a run asks for them).
"""
