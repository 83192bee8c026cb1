"""How the stages run inside a trainer: the only room that knows one.

Read `rollout.py` (the two objects that are handed on) and `host.py` (what a stage may ask), then the stages in the
order of data: `start/` (before the first generation), `generation/`, `measure.py` and `regions.py`, `judge.py`,
`kl.py` and `full_kl.py`, `perceive.py`, `choice/`, `critic/`, `spread.py`, `loss.py`; `passes/` around every pass;
`metrics/`, `recording/` and `checkpoints/` beside them. `finite_updates.py` and `processes.py` are what goes wrong in a
step; `constructed.py` types the trainer.
"""

from vgr_trl.trl_release import check_release

check_release()  # before a stage imports what other releases do not have
