"""Stated answers: where a completion states one, what it says, and whether that is what the row calls right.

Read `stated.py`, `letters.py` (multiple choice), `open_answers.py` with `quantities.py`, `units.py` and `formulas.py`,
`text.py`, then `solutions.py` (what a row's solution means).
"""
