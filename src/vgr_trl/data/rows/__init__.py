"""A row of the user's data, as training reads it.

Read `schema.py` (what a row needs, and why one is left out), `reading.py` and `questions.py` (what a row says),
`prompts.py`, `marks.py` and `special.py` (how it is written down), `columns.py`, `open_images.py`, `video.py`, then the
rest.
"""
