"""`vgr-trl init [FILE]`: a commented YAML file to start from, for a GPU or for a laptop."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from vgr_trl.errors import ConfigError

TEMPLATES = Path(__file__).with_name("templates")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file, which must not be there yet, and return 0."""
    parser = argparse.ArgumentParser(prog="vgr-trl init", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=Path("train.yaml"), help="to write (default train.yaml)")
    parser.add_argument("--laptop", action="store_true", help="for a small model on a CPU")
    flags = parser.parse_args(argv)
    template = TEMPLATES / ("laptop.yaml" if flags.laptop else "gpu.yaml")
    text = template.read_text(encoding="utf-8").format(name=flags.file)
    try:
        with flags.file.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{flags.file} is there already: give another name, or remove it.") from error
    except OSError as error:
        raise ConfigError(f"{flags.file} cannot be written ({error}): give another name.") from error
    print(f"Wrote {flags.file}. Next: edit it, then vgr-trl train --config {flags.file}")
    return 0
