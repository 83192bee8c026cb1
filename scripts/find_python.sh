#!/bin/sh
# Prints the first of the interpreters named that vgr_trl runs with; where there is none, says what is needed.
serves='import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))'
version='import sys; print("Python", *sys.version.split()[:1])'
for python; do
    "$python" -c "$serves" 2>/dev/null && { echo "$python"; exit 0; }
    tried="$tried${tried:+, }$python: $("$python" -c "$version" 2>/dev/null || echo not there)"
done
echo "vgr_trl needs Python 3.11 or newer with its module venv (Debian: apt install python3-venv), tried were $tried;" \
    "name another one: make demo PYTHON=/path/to/python3.12." >&2
exit 1
