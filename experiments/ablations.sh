#!/usr/bin/env bash
# Every run of a grid file over its seeds, then one table and one plot; what has run is not repeated.
#
#   experiments/ablations.sh [GRID.yaml] [--output_dir FOLDER] [--runs NAME …] [--seeds N …]    (default: ablations.yaml)
set -euo pipefail
here="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
grid="$here/ablations.yaml"
if [[ "${1:-}" == *.yaml ]]; then
    grid="$1"
    shift
fi
PYTHONPATH="$here/../benchmarks${PYTHONPATH:+:$PYTHONPATH}" exec python -m compare "$grid" "$@"
