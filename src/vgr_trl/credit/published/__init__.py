"""Rules of credit of published methods, one file each, under the names of their papers; recipes name them.

Like plug-ins they declare what they read and the options that they have: `pgpo.py`, `vepo.py`, `vgpo.py`. `anchors.py`
is a part of a method only, and has a name of its own.
"""

from vgr_trl.credit.published.anchors import AnchorOptions, anchor_tokens
from vgr_trl.credit.published.pgpo import PGPOOptions, pgpo
from vgr_trl.credit.published.vepo import VEPOOptions, vepo
from vgr_trl.credit.published.vgpo import VGPOOptions, vgpo

__all__ = [
    "AnchorOptions",
    "PGPOOptions",
    "VEPOOptions",
    "VGPOOptions",
    "anchor_tokens",
    "pgpo",
    "vepo",
    "vgpo",
]
