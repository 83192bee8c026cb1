"""What a run leaves behind to be continued from, and how it is found again.

Read `manifest.py` (what makes a checkpoint complete), `shares.py` (what each process keeps of its own), `order.py`
(where a continued run stands in its data), `folders.py` (which checkpoint is taken), `resumable.py` (the overrides);
`finish.py` and `termination.py` (runs that were ended).
"""
