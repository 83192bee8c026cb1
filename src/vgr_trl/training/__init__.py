"""How the stages run inside a trainer: the only room that knows one.

Read `rollout.py` (the two objects that are handed on) and `host.py` (what a stage may ask), then the stages in the
order of data: `prepare.py` and `ready_data.py` (before the first generation), `measure.py`, `judge.py`, `kl.py` with
`full_kl.py`, `perceive.py`, `choice/`, `critic/`, `spread.py`, `loss.py`; `passes.py` and `skip.py` around every pass;
`step_metrics.py`, `clock.py`, `collapse_watch.py`, `recording/` and `checkpoints/` beside them.
`constructed.py` types the trainer, `seams.py` says what is relied on in TRL.
"""
