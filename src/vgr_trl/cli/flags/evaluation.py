"""Flags of `vgr-trl evaluate` besides those of the data."""

import os
from dataclasses import dataclass
from pathlib import Path

from vgr_trl.cli.flags.reward_files import RewardFileArguments
from vgr_trl.config.option import option

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vgr_trl" / "evaluations"


@dataclass
class EvaluationArguments(RewardFileArguments):
    """What is evaluated, and how."""

    model_name_or_path: list[str] | None = option(
        None, "Checkpoint folders, LoRA adapter folders or hub names; several stand side by side."
    )
    model_revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    trust_remote_code: bool = option(False, "Allow a model that brings its own code.")
    dtype: str = option("auto", "auto, bfloat16, float16 or float32.")
    num_samples: int = option(8, "k of mean@k and pass@k; 0: greedy only.")
    temperature: float = option(1.0, "Of sampling, above 0.")
    max_completion_length: int = option(512, "In tokens.")
    soft_punish_cache: int | None = option(None, "In tokens, of the reward length.")
    batch_size: int = option(16, "Questions per generation call.")
    blank_images: bool = option(False, "Replace images by grey: what is answered blindly?")
    blind_baseline: bool = option(True, "Answer greedily with grey images too, for the column blind.")
    reward_funcs: list[str] = option([], "Rewards whose means are given too: names, dotted paths, files, as for train.")
    group_by: str | None = option(
        None, "Column; scores are given for each of its values too. Default: family or source; none: none."
    )
    seed: int = option(0, "Of sampling.")
    output_file: str | None = option(None, "Write the numbers there, as JSON.")
    save_completions: bool = option(False, "Add every completion to the JSON.")
    harness_dir: str | None = option(None, "Write the results there in the layout of lm-evaluation-harness.")
    cache_dir: str | None = option(None, f"Folder of evaluations made before (default {CACHE}).")
    use_cache: bool = option(True, "Take an evaluation of the same model, data and settings from the cache.")
