"""Where the signals are hung in verl 0.9.1; imports verl, in which it looks first for what is relied on.

Raises:
    ConfigError: the installed verl lacks some of it.
"""

from vgr_trl.integrations.verl.seams import OF_VERL, check_points

check_points(OF_VERL, "verl 0.9.1")
