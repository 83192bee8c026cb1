"""Flags of commands that are no options of the trainer, and what the libraries below them refuse."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyarrow.lib import ArrowException

from vgr_trl.data.columns import keys_of
from vgr_trl.data.images import MAX_SHORT_SIDE, ImageLimits, ImageRule, VideoOptions
from vgr_trl.data.prompts import SYSTEM_PROMPTS
from vgr_trl.options import option
from vgr_trl.rewards.loading import FileOptions
from vgr_trl.utils import ConfigError, VGRError

# ---------------------------------------------------------------------------------------------------------------------
# What the libraries below refuse, in one sentence, behind what to do about it where that is known.


_ADVICE = (  # part of an error of the libraries below, what to do
    ("support bf16/gpu", "No GPU here computes in bfloat16: give --bf16 false, and --use_cpu where there is none."),
    ("requires the following packages that were not found", "A package is missing: install it as named below."),
    ("vLLM is not available", 'use_vllm is on: pip install "vgr_trl[vllm]", or give --use_vllm false.'),
    (
        "not used by the HfArgumentParser",
        "A word stands among the flags that belongs to none: take it out, or quote it.",
    ),
    ("fail_with_unknown_args", "The configuration file has a key that is no option: --help-all lists them."),
    ("bitsandbytes", "Quantised weights or 8-bit optimizers need bitsandbytes: pip install bitsandbytes."),
    (
        "must be divisible by num_generations",
        "A rollout is no whole number of groups: change num_generations or per_device_train_batch_size, which is "
        "multiplied by the processes and, unless steps_per_generation is given, by gradient_accumulation_steps.",
    ),
    (
        "generations used for evaluation",
        "An evaluation batch is no whole number of groups: change per_device_eval_batch_size, or give "
        "--num_generations_eval.",
    ),
    (
        "Please specify `target_modules`",
        "use_peft is on, and PEFT knows no modules of this model: give --lora_target_modules all-linear, or names such "
        "as q_proj v_proj.",
    ),
    (
        "not found in the base model",
        "No module of the model has a name that lora_target_modules gives: give all-linear, or names such as q_proj "
        "v_proj.",
    ),
    ("CUDA out of memory", "Not enough GPU memory: lower per_device_train_batch_size or max_completion_length."),
)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turn what the libraries below refuse before any work is done into a `ConfigError` of their words."""
    try:
        yield
    except VGRError:
        raise
    except (
        ArrowException,
        AttributeError,
        ImportError,
        KeyError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ConfigError(with_advice(f"{type(error).__name__}: {error}"[:500])) from error


def with_advice(error: str) -> str:
    """Return the text of an error, behind one sentence that says which flag to use if that is known."""
    text = " ".join(error.split())
    advice = next((sentence for part, sentence in _ADVICE if part.lower() in text.lower()), None)
    return text if advice is None else f"{advice} ({text})"


# ---------------------------------------------------------------------------------------------------------------------
# Flags of reward files in the form of EasyR1 and MTRL.


@dataclass
class RewardFileArguments:
    """How functions of files in the form of EasyR1 are called; of other rewards, the options that they declare."""

    reward_type: str | None = option(None, "Form of reward files of EasyR1: batch or sequential (else as they say).")
    reward_num_cpus: int = option(1, "Processes that a sequential reward file of EasyR1 is called in.")
    reward_function_kwargs: str | None = option(None, "Further arguments of reward files of EasyR1, as JSON.")

    plugin_options: dict[str, Any] = field(default_factory=dict, init=False)

    def take_plugin_options(self, values: Mapping[str, Any]) -> None:
        """Keep the values of the options of plug-ins, of which the rewards look up theirs."""
        self.plugin_options = dict(values)

    def file_options(self) -> FileOptions:
        """Return the options as the rewards take them, or raise `ConfigError` where they are no JSON object."""
        given = self.reward_function_kwargs
        try:
            arguments = json.loads(given) if isinstance(given, str) else given or {}
        except ValueError as error:
            raise ConfigError(f"reward_function_kwargs is {given!r}, which is no JSON ({error}).") from error
        if not isinstance(arguments, dict):
            raise ConfigError(f"reward_function_kwargs is {given!r}: give a JSON object of names and values.")
        return FileOptions(self.reward_type, self.reward_num_cpus, arguments)


# ---------------------------------------------------------------------------------------------------------------------
# Flags that are not options of the trainer: which data, which rewards.


@dataclass
class DataArguments:
    """Where the questions come from."""

    dataset_name: str | None = option(None, "Name of a data set on the hub.")
    dataset_config: str | None = option(None, "Configuration of the hub data set.")
    dataset_path: str | None = option(None, "Folder with a data set: files of one kind, or written by save_to_disk.")
    data_files: str | None = option(
        None,
        "train=a.parquet,test=b.parquet; several files as train=a.jsonl+b.jsonl, train=*.jsonl, or by the flag again; "
        "Parquet, JSON, JSONL, CSV or Arrow.",
    )
    problem_key: str | None = option(
        None,
        "Column of the question, a text or messages (else prompt, problem, question, query, messages or "
        "conversations).",
    )
    solution_key: str | None = option(
        None, "Column of the right answer (else solution, answer, label_idx or correct_choice_idx)."
    )
    choices_key: str | None = option(None, "Column of the options (else choices or options); none: there are none.")
    image_key: str | None = option(None, "Column of the images (else images or image); none: train on the text alone.")
    video_key: str | None = option(None, "Column of the videos (else videos or video); none: there are none.")
    image_dir: str | None = option(
        None, "Folder that paths of images and videos start from and stay in (else the data's)."
    )
    min_pixels: int | None = option(None, "Enlarge smaller images to this area.")
    max_pixels: int | None = option(None, "Reduce larger images to this area.")
    max_short_side: int | None = option(None, "Reduce images whose shorter side has more pixels; 0: none.")
    filter_big_images: bool = option(
        False, "Leave out rows with images above max_pixels or max_short_side (1024 if neither is given)."
    )
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str = option("test", "Split to evaluate on.")
    dataset_streaming: bool = option(False, "Read rows as they are needed (max_steps is set).")
    test_dataset: str | None = option(
        None, "Hub name, folder or file to evaluate on, where that is not a split of the same data."
    )
    max_train_rows: int | None = option(None, "Train on the first so many rows only.")
    max_test_rows: int | None = option(None, "Evaluate on the first so many rows only.")
    system_prompt_file: str | None = option(
        None,
        "File whose content replaces the system prompt: a text or a Jinja2 template with problem, choices, letters and "
        "source; an empty file, or none: no system prompt.",
    )
    question_template_file: str | None = option(
        None, "Jinja2 template of what the user says, with the question as content; without system prompt."
    )
    prompt_language: str | None = option(None, "Language of the standard system prompt: en (default) or zh.")
    video_fps: float = option(2.0, "Frames taken of each second of a video.")
    max_video_frames: int = option(16, "Most frames of one row; rows with more are left out and listed.")

    def __post_init__(self) -> None:
        if isinstance(self.data_files, list):  # of a YAML file
            self.data_files = ",".join(map(str, self.data_files))
        keys_of(**vars(self))
        self.image_rule()
        if self.image_dir is not None and not Path(self.image_dir).is_dir():
            raise ConfigError(f"image_dir is {self.image_dir}, which is not a folder.")
        if self.prompt_language not in (None, *SYSTEM_PROMPTS):
            raise ConfigError(f"prompt_language is {self.prompt_language!r}: give one of {', '.join(SYSTEM_PROMPTS)}.")
        if self.prompt_language is not None and self.system_prompt_file is not None:
            raise ConfigError(
                "prompt_language and system_prompt_file are both given, but a file has its own language: drop one."
            )
        if self.question_template_file is not None and (self.prompt_language or self.system_prompt_file):
            raise ConfigError(
                "question_template_file is given with a system prompt (system_prompt_file or prompt_language), but it "
                "goes without: drop one."
            )
        VideoOptions(self.video_fps, self.max_video_frames)
        for name in ("max_train_rows", "max_test_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}: give an integer of at least 1.")

    def image_rule(self) -> ImageRule:
        """Return what becomes of images that are too large or too small."""
        short = self.max_short_side
        if self.filter_big_images and short is None and self.max_pixels is None:
            short = MAX_SHORT_SIDE
        return ImageRule(ImageLimits(self.min_pixels, self.max_pixels, short or None), self.filter_big_images)


class DefaultRewards(list[str]):
    """The rewards of a run that names none, of which those that need images are left out where there are none."""

    @classmethod
    def of_run(cls, weights: Sequence[float] | None) -> "DefaultRewards":
        """Return the four of every run; five weights are those of scripts that count tags too, in fourth place."""
        counts = ("tag_count",) if weights is not None and len(weights) == 5 else ()
        return cls(("accuracy", "vgr", "format", *counts, "length"))


@dataclass
class RewardArguments(RewardFileArguments):
    """What a completion earns its reward for."""

    reward_funcs: list[str] = option(
        DefaultRewards.of_run(None),
        "Rewards in the order of reward_weights: names (accuracy, vgr, vgr_hard_negative, mdi, region, "
        "blind_accuracy, format, tag_count, length, those of installed packages), dotted paths "
        "(my_package.rewards.my_reward) or files (my_rewards.py:my_reward).",
    )
    reward_model_name_or_path: str | None = option(
        None, "A sequence-classification model whose score is one more, first reward."
    )


@dataclass
class RunArguments:
    """What the command starts from, and how far it goes."""

    recipe: str | None = option(
        None,
        "Start from the options of a published method (vgr-trl recipes lists them; or a file of your own, my.yaml). "
        "--config overrides them, and flags override both.",
    )
    dry_run: bool = option(
        False,
        "Load everything, put a few prompts through one step, show them and what the whole run would take, and write "
        "nothing.",
    )
    ignore_unknown_keys: bool = option(
        False,
        "With a configuration of EasyR1, MTRL or verl as --config: run without the keys that have no meaning here; "
        "without this flag they stop the run.",
    )
