"""What shell scripts that train would start, with stand-ins for the programs that they call."""

import os
import subprocess
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples" / "verl"
STAND_INS = {
    "python3": '[ "$1" = -c ] && { [[ $2 = *r.__file__* ]] && echo rewards.py; exit; }\nprintf "%s\\n" "$@"',
    "ray": '[ "$1" = status ] && { echo node_1; echo node_2; exit; }\necho "ray $*"',
}


def said(script, folder, **environment):
    """Lines that are printed: a line of Ray, or the arguments of Python."""
    for name, does in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{does}\n")
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "DEVICE": "gpu", **environment}
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def overrides(script, folder, **environment):
    """The module that Python would run, and its overrides."""
    lines = said(script, folder, **environment)
    start = lines.index("-m")
    return lines[start + 1], lines[start + 2 :]
