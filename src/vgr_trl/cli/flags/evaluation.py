"""Flags of `vgr-trl evaluate` besides those of the data."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from vgr_trl.cli.flags.reward_files import RewardFileArguments

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vgr_trl" / "evaluations"


@dataclass
class EvaluationArguments(RewardFileArguments):
    """What is evaluated, and how."""

    model_name_or_path: list[str] | None = field(
        default=None,
        metadata={"help": "Checkpoint folders, LoRA adapter folders or hub names; several stand side by side."},
    )
    model_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a hub model."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Allow a model that brings its own code."})
    dtype: str = field(default="auto", metadata={"help": "auto, bfloat16, float16 or float32."})
    num_samples: int = field(default=8, metadata={"help": "k of mean@k and pass@k; 0: greedy only."})
    temperature: float = field(default=1.0, metadata={"help": "Of sampling, above 0."})
    max_completion_length: int = field(default=512, metadata={"help": "In tokens."})
    soft_punish_cache: int | None = field(default=None, metadata={"help": "In tokens, of the reward length."})
    batch_size: int = field(default=16, metadata={"help": "Questions per generation call."})
    blank_images: bool = field(default=False, metadata={"help": "Replace images by grey: what is answered blindly?"})
    blind_baseline: bool = field(
        default=True, metadata={"help": "Answer greedily with grey images too, for the column blind."}
    )
    reward_funcs: list[str] = field(
        default_factory=list,
        metadata={"help": "Rewards whose means are given too: names, dotted paths, files, as for train."},
    )
    group_by: str | None = field(
        default=None,
        metadata={
            "help": "Column; scores are given for each of its values too. Default: family or source; none: none."
        },
    )
    seed: int = field(default=0, metadata={"help": "Of sampling."})
    output_file: str | None = field(default=None, metadata={"help": "Write the numbers there, as JSON."})
    save_completions: bool = field(default=False, metadata={"help": "Add every completion to the JSON."})
    harness_dir: str | None = field(
        default=None, metadata={"help": "Write the results there in the layout of lm-evaluation-harness."}
    )
    cache_dir: str | None = field(
        default=None, metadata={"help": f"Folder of evaluations made before (default {CACHE})."}
    )
    use_cache: bool = field(
        default=True, metadata={"help": "Take an evaluation of the same model, data and settings from the cache."}
    )
