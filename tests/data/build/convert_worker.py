"""A conversion with two decoding processes that waits at a row to be killed: convert_worker.py FOLDER ROWS ROW."""

import sys
import time
from pathlib import Path

from support.made_sets import picture

from vgr_trl.data.columns import Origin, Question
from vgr_trl.data.convert import Output, convert


def candidates(count: int, waits_at: int | None = None):
    for number in range(count):
        if number == waits_at:
            time.sleep(900)
        if number % 7 == 3:
            yield Origin("made", number), f"row {number} is bad"
        else:
            yield Origin("made", number), Question(f"q{number}", "made", "What?", "x", [picture((number, 0, 0))])


def output(folder: Path, workers: int = 0) -> Output:
    return Output(folder, rows_per_file=20, workers=workers)


if __name__ == "__main__":
    convert(candidates(int(sys.argv[2]), int(sys.argv[3])), output(Path(sys.argv[1]), workers=2), "the same")
