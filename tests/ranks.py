"""Several processes of one test, none of which outlives it."""

import subprocess

SECONDS = 900  # for what hangs; a machine that does much else must not reach it


def outputs(*started: subprocess.Popen) -> list[tuple]:
    """What each process has written to (stdout, stderr), once all have ended."""
    try:
        return [process.communicate(timeout=SECONDS) for process in started]
    finally:
        for process in started:
            with process:
                process.kill()
