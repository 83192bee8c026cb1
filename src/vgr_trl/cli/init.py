"""`vgr-trl init [FILE]`: a commented YAML file to start from, for a GPU or for a laptop.

For a laptop also what the file names: a tiny model to train, and questions about drawn shapes, in `tiny_vlm` beside it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from vgr_trl.utils import ConfigError

TEMPLATES = Path(__file__).with_name("templates")
TINY = "tiny_vlm"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file, which must not be there yet, and return 0."""
    parser = argparse.ArgumentParser(prog="vgr-trl init", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=Path("train.yaml"), help="to write (default train.yaml)")
    parser.add_argument("--laptop", action="store_true", help="for a CPU, with a tiny model and data (a minute or two)")
    flags = parser.parse_args(argv)
    if flags.file.exists():
        raise ConfigError(f"{flags.file} is there already: give another name, or remove it.")
    template = TEMPLATES / ("laptop.yaml" if flags.laptop else "gpu.yaml")
    folder = flags.file.parent / TINY
    try:
        if flags.laptop:
            _write_tiny(folder)
        flags.file.write_text(template.read_text(encoding="utf-8").format(name=flags.file, tiny=folder), "utf-8")
    except OSError as error:
        raise ConfigError(f"{flags.file} cannot be written ({error}): give another name.") from error
    step = "" if flags.laptop else "edit it, then "
    print(f"Wrote {flags.file}. Next: {step}vgr-trl train --config {flags.file}")
    return 0


def _write_tiny(folder: Path) -> None:
    from vgr_trl.demo.options import Options  # after the flags: these import torch
    from vgr_trl.demo.write_folder import write_warm_folder

    print(f"Warm-starting a tiny vision-language model, to be written to {folder} with questions to train and test on.")
    write_warm_folder(folder, Options(warm_start_accuracy=0.45))  # lower than the demo's: the rise shows in fewer steps
