"""What shell scripts that train would start, with a stand-in for Python."""

import os
import subprocess
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples" / "verl"
PYTHON = '[ "$1" = -c ] && { [[ $2 = *r.__file__* ]] && echo rewards.py; exit; }\nprintf "%s\\n" "$@"'


def overrides(script, folder):
    (folder / "python3").write_text(f"#!/bin/bash\n{PYTHON}\n")
    (folder / "python3").chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "DEVICE": "gpu"}
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    start = lines.index("-m")
    return lines[start + 1], lines[start + 2 :]
