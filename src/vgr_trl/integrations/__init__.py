"""The rooms that do not know TRL, inside other trainers. `verl/`: verl and EasyR1."""
