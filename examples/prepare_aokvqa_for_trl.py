"""Convert A-OKVQA: what `vgr-trl data convert aokvqa` does, for the splits that have answers.

python examples/prepare_aokvqa_for_trl.py --dataset_path HuggingFaceM4/A-OKVQA --out_dir aokvqa \
    --question_id_file A-OKVQA_question_id.txt --subset_size 200
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vgr_trl.cli.__main__ import main
from vgr_trl.data.convert import HUB_NAME
from vgr_trl.data.load import row_files, splits_of

SPLITS = ("train", "validation")  # the published test split has no answers


def prepare(argv: Sequence[str] | None = None) -> int:
    """Convert every split with answers, and return 0, or the status of the first that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset_path", default=HUB_NAME, help=f"folder, file or hub name (default {HUB_NAME})")
    parser.add_argument("--out_dir", "--output_dir", required=True, help="folder for the converted set")
    parser.add_argument("--question_id_file", help="keep only the ids in this file, one per line")
    parser.add_argument("--subset_size", type=int, default=0, help="stop each split after so many rows; 0: all")
    parser.add_argument("--filter_big_images", action="store_true", help="leave out images wider or higher than 1024")
    parser.add_argument("--use_chat_template", action="store_true", help="no effect: training builds conversations")
    flags, others = parser.parse_known_args(argv)
    folder = Path(flags.dataset_path)
    kind = "--data_files" if folder.is_file() else "--dataset_path" if folder.is_dir() else "--dataset_name"
    given = [kind, flags.dataset_path]
    given += ["--output_dir", flags.out_dir, *others]
    if flags.question_id_file:
        given += ["--question_id_file", flags.question_id_file]
    if flags.subset_size:
        given += ["--subset_size", str(flags.subset_size)]
    if flags.filter_big_images:
        given.append("--filter_big_images")
    named = folder.name if folder.is_file() else splits_of(row_files(folder), folder) if folder.is_dir() else SPLITS
    for split in [name for name in SPLITS if name in named] or ["train"]:
        if status := main(["data", "convert", "aokvqa", "--split", split, *given]):
            return status
    return 0


if __name__ == "__main__":
    sys.exit(prepare())
