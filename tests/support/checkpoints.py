"""What a run has left to be continued from."""

from vgr_trl.checkpoints import checkpoints_of, why_incomplete


def complete_checkpoints(output_dir):
    """The checkpoints of a run that are whole, oldest first."""
    return [path for path in checkpoints_of(output_dir) if not why_incomplete(path)]
