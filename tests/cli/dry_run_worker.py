"""One process of a dry run: what it prints goes to a file of its own. Arguments: folder, then flags of train."""

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch

from vgr_trl.cli.__main__ import main

if __name__ == "__main__":
    folder, *flags = sys.argv[1:]
    torch.set_num_threads(1)
    with (Path(folder) / f"printed_{os.environ['RANK']}.txt").open("w") as file, redirect_stdout(file):
        status = main(["train", *flags])
    sys.exit(status)
