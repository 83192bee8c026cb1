"""What a run leaves of its rollouts for people to look at: read `record.py`, then what it calls."""
