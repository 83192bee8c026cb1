"""How the stages run inside a trainer: the only room that knows one.

Read `prepare.py` (before the first generation), then the stages in the order of data: `measure.py`, `perceive.py`,
`choose.py` with `replay.py` and `greedy_baseline.py`, `loss.py`; `record.py` and `checkpoints/` beside them. `host.py`
says what is relied on in TRL.
"""
