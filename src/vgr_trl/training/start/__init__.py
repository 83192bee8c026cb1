"""What is made sure of before the first generation.

Read `prepare.py` (rewards, columns, prompts), then `ready_data.py` (what users need not do themselves); `seams.py` says
what is relied on in TRL.
"""
