"""`vgr-trl completion bash|zsh`: commands and flags for the shell's completion."""

import argparse
from collections.abc import Sequence

from vgr_trl.cli.flags import flag_names

_BASH = """\
_vgr_trl() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}"
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}:$word" in
{cases}
        *) COMPREPLY=($(compgen -f -- "$word")) ;;
    esac
}}
complete -F _vgr_trl vgr-trl
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a script for the shell, and return 0."""
    parser = argparse.ArgumentParser(prog="vgr-trl completion", description=__doc__)
    parser.add_argument("shell", choices=("bash", "zsh"), help='eval "$(vgr-trl completion bash)"')
    print(script(parser.parse_args(argv).shell), end="")
    return 0


def script(shell: str) -> str:
    """Return the script; zsh reads that of bash."""
    from vgr_trl.cli.__main__ import COMMANDS

    flags = {name: sorted(flag_names(name)) for name in COMMANDS}
    cases = "\n".join(
        f'        {name}:--*) COMPREPLY=($(compgen -W "{" ".join(f"--{flag}" for flag in known)}" -- "$word")) ;;'
        for name, known in flags.items()
        if known
    )
    before = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return before + _BASH.format(commands=" ".join(COMMANDS), cases=cases)
