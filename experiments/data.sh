#!/usr/bin/env bash
# The questions of the experiments from the public sets: A-OKVQA, ArxivQA and MMMU-Pro from the hub, merged to one set of
# multiple choice. An earlier result is replaced. MMMU-Pro is a benchmark: do not report results on it afterwards.
#
#   experiments/data.sh [FOLDER [FLAG …]]    FOLDER gets aokvqa, arxivqa, mmmu_pro and the merged ddm (default data);
#                                            flags of `vgr-trl data convert`, such as --subset_size 200, hold for each set
set -euo pipefail
folder="${1:-data}"
shift || true

for name in aokvqa arxivqa mmmu_pro; do
    vgr-trl data convert "$name" --output_dir "$folder/$name" "$@"
done
vgr-trl data merge "$folder/aokvqa" "$folder/arxivqa" "$folder/mmmu_pro" --shuffle_choices --output_dir "$folder/ddm"
echo "Train on it: vgr-trl train --dataset_path $folder/ddm …, or experiments/experiment3.sh --dataset_path $folder/ddm"
