"""`vgr-trl demo`: warm-start a tiny vision-language model, train it with `DAPOTrainer`, compare before and after."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from vgr_trl.demo.options import Options

IDENTITY = {"command": "demo"}  # a demo may be run again in its own folder, not in another run's


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return 0 if held-out accuracy rose, else 1."""
    parser = argparse.ArgumentParser(prog="vgr-trl demo", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of questions, weights and sampling (default 0)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/demo"), help="run folder (default runs/demo)")
    parser.add_argument("--steps", type=int, default=Options.steps, help=f"of reinforcement (default {Options.steps})")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    flags = parser.parse_args(argv)
    # After the flags: these import torch.
    from vgr_trl.cli.train import claim_again, write_identity
    from vgr_trl.demo.demo import run_demo

    claim_again(flags.output_dir, IDENTITY)
    write_identity(flags.output_dir, IDENTITY)
    comparison = run_demo(Options(seed=flags.seed, steps=flags.steps, threads=flags.threads), flags.output_dir)
    return 0 if comparison.rose else 1
