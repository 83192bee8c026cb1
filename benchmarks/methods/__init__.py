"""A bench of methods for credit and reward, on models small enough to train from nothing in minutes.

Read `tasks.py` (questions) with `fillers.py` (words that answer nothing), `contenders.py` (methods) with `controls.py`
(credit that knows the truth, or nothing), `runs.py` (one model, trained by one method) with `thoughts.py`,
`__main__.py` (what is missing is run), `leaderboard.py` (the tables) with `seeds.py` and `plots.py`. The findings are
in `findings.md`.
"""
