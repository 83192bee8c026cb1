"""What others call our options: earlier scripts (`aliases.py`), and EasyR1, MTRL and verl in files of theirs.

Read `keys.py`, then the tables: `easyr1.py` (every key of EasyR1, or why not), `dialects.py` (names that MTRL, VPPO and
verl have for the same). `rules/` has what takes several keys together, `translate.py` puts them in order.
"""
