"""What is made sure of before the first generation.

Read `prepare.py` (rewards, columns, prompts), `ready_data.py` (what users need not do themselves), `measurable.py`
(what is measured), `refusals.py` (what does not go together), `plans.py` (what passes leave out), then `stages.py`
(what a run is made of); `seams.py` says what is relied on in TRL.
"""
