"""What records and logs look like.

Read `page/` (a page of HTML), `markdown/` (logs), `card/` (a model card); in a notebook `notebook.py` with
`colours.py`, on a terminal `console.py` and `step_line.py`; `boxes.py` counts attention in boxes.
"""
