"""What a run leaves for people to look at.

Read `record.py`, then what it calls: `taking.py` (rows as training leaves them), `recorded_rows.py` and `pictures.py`
(what becomes of them). `before.py` is the record of step 0, `card.py` the model card.
"""
