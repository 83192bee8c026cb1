"""A row of the user's data, as training reads it.

Read `schema.py` (what a row needs, and why one is left out), `reading.py` and `questions.py` (what a row says), `text/`
(how it is written down for the model), `columns.py`, `images/` (its images and videos), `repeated.py` (rows that are
asked for again and again), then the rest.
"""
