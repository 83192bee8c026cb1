"""Flags that are not options of the trainer: which data, which rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vgr_trl.cli.flags.reward_files import RewardFileArguments
from vgr_trl.config.option import option
from vgr_trl.data.rows.images.sizes import MAX_SHORT_SIDE, ImageLimits, ImageRule
from vgr_trl.data.rows.images.video import VideoOptions
from vgr_trl.data.rows.naming import keys_of
from vgr_trl.data.rows.text.prompts import SYSTEM_PROMPTS
from vgr_trl.errors import ConfigError


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
