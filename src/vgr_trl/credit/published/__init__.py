"""Rules of credit of published methods, one file each, under the names of their papers; recipes name them.

Like plug-ins they declare what they read and the options that they have.
"""

from vgr_trl.credit.published.pgpo import PGPOOptions, pgpo
from vgr_trl.credit.published.vgpo import VGPOOptions, vgpo

__all__ = ["PGPOOptions", "VGPOOptions", "pgpo", "vgpo"]
