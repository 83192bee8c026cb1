import subprocess
import sys
from pathlib import Path

from support.launching import SECONDS, environment

from vgr_trl.checkpoints import checkpoints_of, why_incomplete

ROOT = Path(__file__).parents[2]


def train_command(model: Path, data: str | Path, output: Path, flags: str = "", launcher: str = "") -> list[str]:
    """Train without a system prompt, four completions of at most six tokens each; `flags` stand last, and win."""
    common = (
        f"examples/train_grpo_vlm.py --model_name_or_path {model} --data_files {data} --use_cpu --output_dir {output} "
        "--system_prompt_file none --bf16 false --gradient_checkpointing false --num_generations 4 "
        "--max_completion_length 6 --report_to none --logging_steps 1"
    )
    return [sys.executable, *f"{launcher} {common} {flags}".split()]


def finish(command: list[str], **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, cwd=ROOT, env=environment(**variables), capture_output=True, text=True, timeout=SECONDS
    )


def complete_checkpoints(output_dir: str | Path) -> list[Path]:
    return [path for path in checkpoints_of(output_dir) if not why_incomplete(path)]
