"""Parse the flags of `vgr-trl train` and `evaluate`, and load the data and processors that they name."""

import argparse
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, NoReturn, get_type_hints

import datasets
from huggingface_hub import constants
from peft import PeftConfig
from pyarrow.lib import ArrowException
from safetensors import SafetensorError
from transformers import AutoProcessor, HfArgumentParser
from transformers.hf_argparser import string_to_bool
from transformers.utils import find_adapter_config_file
from trl import ModelConfig

from vgr_trl.config_converters import convert, read_configuration
from vgr_trl.config_converters.key_tables import explain_unknown, load_flags
from vgr_trl.dapo_config import LOSS_TYPES, SEGMENTED, SPELLINGS, DAPOConfig, rename_options
from vgr_trl.data.checked_rows import SHARED, SkippedRow, prepare_rows, shared_folder
from vgr_trl.data.images import ImageLimits, downloaded
from vgr_trl.data.load import BUILDERS, load_split, parse_data_files, readable
from vgr_trl.data.prompts import SYSTEM_PROMPTS, PromptTemplate, refuse_single_image_models, special_tokens
from vgr_trl.data.read_row import keys_of, require_columns
from vgr_trl.errors import ConfigError, VGRError, error_text, naming_torchvision
from vgr_trl.options import Checked, check_options, check_value, option, read_mapping
from vgr_trl.recipes import drop_displaced, load_recipe, override_recipe, read_options
from vgr_trl.rewards.loading import FileOptions, load_rewards

DATA_SOURCES = ("dataset_name", "dataset_config", "dataset_path", "data_files")


# fmt: off
@dataclass
class RunArguments:
    """Command"""

    recipe: str | None = option(None, "Start from the options of a published method (vgr-trl recipes lists them) "
        "or of your own file (my.yaml). --config overrides it; flags override both.")
    dry_run: bool = option(False, "Load everything, run two steps on a few prompts, print completions and an "
        "estimate of the whole run's time and memory; write nothing.")
    verbose: bool = option(False, "Print at the start which features are on, and why the others are off.")
    ignore_unknown_keys: bool = option(False, "If --config is a file of EasyR1, MTRL or verl: ignore keys that have "
        "no equivalent here instead of stopping.")


@dataclass
class DataArguments:
    """Data"""

    dataset_name: str | None = option(None, "Hub data set.")
    dataset_config: str | None = option(None, "Configuration of the hub data set.")
    dataset_path: str | None = option(None, "Data set folder: files of one format, or written by save_to_disk.")
    data_files: str | None = option(None, "train=a.parquet,test=b.parquet; several files: train=a.jsonl+b.jsonl, "
        "train=*.jsonl, or repeat the flag. Parquet, JSON, JSONL, CSV or Arrow.", nargs="+", action="extend")
    problem_key: str | None = option(None, "Question column (default: prompt, problem, question, query, …).")
    solution_key: str | None = option(None, "Answer column (default: solution, answer, label_idx, …).")
    choices_key: str | None = option(None, "Choices column (default: choices or options); none: open questions.")
    image_key: str | None = option(None, "Image column (default: images or image); none: train on text only.")
    video_key: str | None = option(None, "Video column (default: videos or video); none: ignore videos.")
    image_dir: str | None = option(None, "Root folder for relative image paths; paths may not leave it "
        "(default: the folder of the data); shared: the folder that all absolute paths share.")
    min_pixels: int | None = option(None, "Enlarge smaller images to this area, in pixels.", ge=1)
    max_pixels: int | None = option(None, "Shrink larger images to this area, in pixels.", ge=1)
    max_short_side: int | None = option(None, "Shrink images whose shorter side exceeds this, in pixels; 0: off.", ge=0)
    filter_big_images: bool = option(False, "Skip rows that have an image wider or higher than 1024 pixels.")
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str = option("test", "Split to evaluate on.")
    dataset_streaming: bool = option(False, "Stream rows instead of loading the split; requires max_steps.")
    test_dataset: str | None = option(None, "Separate evaluation data: hub name, folder or file.")
    max_train_rows: int | None = option(None, "Use only the first N training rows.", ge=1)
    max_test_rows: int | None = option(None, "Use only the first N evaluation rows.", ge=1)
    system_prompt_file: str | None = option(None, "System prompt file: text, or a Jinja2 template with problem, "
        "choices, letters and source; an empty file, or none: no system prompt.")
    question_template_file: str | None = option(None, "Jinja2 template of the whole prompt; content is the question.")
    prompt_language: Literal["en", "zh"] | None = option(None, "Language of the default system prompt.")
    video_fps: float = option(2.0, "Frames sampled per second of video.", gt=0, le=1000)
    max_video_frames: int = option(16, "Maximum frames per row; rows with more are skipped and listed.", ge=1)
    # fmt: on

    def __post_init__(self) -> None:
        if isinstance(self.data_files, list):
            self.data_files = ",".join(map(str, self.data_files))
        check_options(self)
        keys_of(**vars(self))
        self.image_limits()
        if self.image_dir not in (None, SHARED) and not Path(self.image_dir).is_dir():
            raise ConfigError(f"image_dir is {self.image_dir}, which is not a folder.")
        if len(self.prompt_options()) > 1:
            raise ConfigError("prompt_language, system_prompt_file and question_template_file: give only one of them.")

    def source(self) -> dict[str, Any]:
        """Return the options of the data source, by name."""
        return {name: vars(self)[name] for name in DATA_SOURCES}

    def prompt_options(self) -> list[str]:
        """Return the given options that choose the system prompt."""
        prompts = self.prompt_language, self.system_prompt_file, self.question_template_file
        return [prompt for prompt in prompts if prompt is not None]

    def image_limits(self) -> ImageLimits:
        """Return the limits for images that are too large or too small."""
        return ImageLimits(self.min_pixels, self.max_pixels, self.max_short_side, self.filter_big_images)


@dataclass
class RewardFileArguments(Checked):
    """Reward files"""

    # fmt: off
    reward_type: str | None = option(None, "Form of EasyR1 reward files: batch or sequential (default: detected).")
    reward_num_cpus: int = option(1, "Worker processes for a sequential EasyR1 reward file.")
    reward_function_kwargs: dict[str, Any] | str | None = option(None, "JSON object: extra arguments of EasyR1 reward "
        "files, and options that other rewards declare.")
    # fmt: on

    def load(self, specs: Sequence[str], max_completion_length: int | None, soft_punish_cache: int | None) -> list[Any]:
        """Return reward functions by name, with `reward_function_kwargs` bound.

        Args:
            specs: names, dotted paths or files of rewards.
            max_completion_length: limit of the length reward, in tokens.
            soft_punish_cache: tokens below this limit from which on the length reward falls; None: a fifth of it.
        """
        arguments = read_mapping("reward_function_kwargs", self.reward_function_kwargs)
        files = FileOptions(self.reward_type, self.reward_num_cpus, arguments)
        sizes = {"max_completion_length": max_completion_length, "soft_punish_cache": soft_punish_cache}
        return load_rewards(specs, **sizes, files=files, options=arguments)


# fmt: off
@dataclass
class RewardArguments(RewardFileArguments):
    """Rewards and tools"""

    reward_funcs: list[str] = option(["accuracy", "format", "length"], "Rewards, in the order of reward_weights: names "
        "(accuracy, vgr, vgr_hard_negative, mdi, region, blind_accuracy, format, think_only_format, tag_count, "
        "paired_tags, tool_reward, tool_cost, length, or of installed packages), dotted paths "
        "(my_package.rewards.my_reward) or files (my_rewards.py:my_reward).")
    reward_model_name_or_path: str | None = option(None, "Sequence classifier whose score is the first reward.")
    environment: str | None = option(None, "Tools that completions may call: zoom, look_again, or a class of your own, "
        "as a dotted path (my_package.tools.MyTools) or file (my_tools.py:MyTools).")


@dataclass
class EvaluationArguments(RewardFileArguments):
    """Evaluation"""

    model_name_or_path: list[str] | None = option(None, "Checkpoints, LoRA adapters or hub names to evaluate.")
    model_revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    trust_remote_code: bool = option(False, "Run Python code that comes with the model.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option("auto", "Dtype of the weights.")
    num_samples: int = option(8, "Samples per question: k of mean@k and pass@k; 0: greedy only.", ge=0)
    temperature: float = option(1.0, "Sampling temperature.", gt=0)
    max_completion_length: int = option(512, "Maximum completion length, in tokens.", ge=1)
    soft_punish_cache: int | None = option(None, "Length of the penalty ramp of the length reward, in tokens.")
    batch_size: int = option(16, "Questions per generation call.", ge=1)
    blank_images: bool = option(False, "Replace images with grey to measure accuracy without vision.")
    blind_baseline: bool = option(True, "Also answer greedily with grey images, for the column blind.")
    reward_funcs: list[str] = option([], "Also print the means of these rewards, named as for train.")
    group_by: str | None = option(None, "Also score per value of this column (default: family or source); none: off.")
    seed: int = option(0, "Sampling seed.")
    output_file: str | None = option(None, "JSON file to write the scores to.")
    save_completions: bool = option(False, "Also write questions, images and completions, for `vgr-trl report`.")
    # fmt: on


_OF_TRAINING = RunArguments, RewardArguments, DAPOConfig, ModelConfig
TRAINING_OPTIONS = frozenset(field.name for group in _OF_TRAINING for field in fields(group))


OF_LIBRARIES = ArrowException, ImportError, KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError


@contextmanager
def raise_config_errors(model: str | None = None) -> Iterator[None]:
    """Convert errors that libraries raise for bad input into a `ConfigError`; only before any work is done.

    Args:
        model: folder or hub name of the model that the block loads, or None.
    """
    try:
        yield
    except VGRError:
        raise
    except OF_LIBRARIES as error:
        cause = f"{type(error).__name__}: {error_text(error, 450)}"
        cause += " On a CPU, give --use_cpu --bf16 false." * ("assign use_cpu" in cause)
        cause += f". Instead: {load_flags()['ms-swift']['deepspeed']}." * ("deepspeed config" in cause)
        load = f"{model} cannot be loaded ({cause}): give a model folder or a hub name."
        raise ConfigError(load if model else cause) from error


def load_system_prompt(arguments: DataArguments) -> str | PromptTemplate | None:
    """Return the system prompt: from `system_prompt_file` or `question_template_file`, else the default prompt."""
    option, path = "system_prompt_file", arguments.system_prompt_file
    if is_question := arguments.question_template_file is not None:
        option, path = "question_template_file", arguments.question_template_file
    if path is None:
        return SYSTEM_PROMPTS[arguments.prompt_language or "en"]
    try:
        text = "" if path == "none" else Path(path).read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} is {path}, which cannot be read as UTF-8 text ({error}).") from error
    if is_question:
        return PromptTemplate(text, f"{option} {path}", "user")
    return PromptTemplate(text, f"{option} {path}") if text else None


def evaluation_source(arguments: DataArguments) -> DataArguments:
    """Return the arguments for loading evaluation data: the same, or with `test_dataset` as the source."""
    test = arguments.test_dataset
    if test is None:
        return arguments
    source: dict[str, Any] = dict.fromkeys((*DATA_SOURCES, "test_dataset"))
    kind = source_option(test)
    source[kind] = f"{arguments.dataset_test_split}={test}" if kind == "data_files" else test
    return replace(arguments, **source)


def source_option(name: str) -> str:
    """Return the option for a data source: `dataset_path` for a folder, `data_files`, or `dataset_name`."""
    path = Path(name)
    is_file = path.is_file() or path.suffix.lower() in BUILDERS
    return "dataset_path" if path.is_dir() else "data_files" if is_file else "dataset_name"


def keep_offline(*names: str | None) -> None:
    """Disable the download counter of `datasets` and TRL's telemetry if every name is a local path or None.

    Both contact a server even for local files (`HF_UPDATE_DOWNLOAD_COUNTS`, `HF_HUB_DISABLE_TELEMETRY`).
    """
    if all(name is None or Path(name).exists() for name in names):
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS, constants.HF_HUB_DISABLE_TELEMETRY = False, True


def source_name(data: DataArguments) -> str:
    """Return the data source as text: hub name, folder or files."""
    return str(data.dataset_name or data.dataset_path or data.data_files)


def load_rows(
    arguments: DataArguments, split: str, *, limit: int | None, processor: Callable[[], Any] | None = None, **rules: Any
) -> tuple[Any, list[SkippedRow]]:
    """Load a split: return the usable rows, with prompts, and the skipped rows.

    Args:
        limit: use only the first N rows.
        processor: returns the model's processor; rows whose text has its special tokens are refused.
        rules: further arguments of `prepare_rows`: `needs_solution`, `boxes`, `on_skipped`, `shuffle_seed`, and
            `system_prompt` if it is not that of `arguments`.

    Raises:
        ConfigError, DataError: an option or the data cannot be used.
    """
    streaming, with_folders = arguments.dataset_streaming, arguments.image_dir is None
    keys = keys_of(**vars(arguments))
    check = partial(require_columns, needs_solution=rules.get("needs_solution", True), keys=keys, is_part=True)
    dataset = load_split(split, streaming=streaming, with_folders=with_folders, check=check, **arguments.source())
    if limit is not None:
        dataset = dataset.take(limit if streaming else min(limit, len(dataset)))
    with readable(source_name(arguments), "the data"):  # a stream raises read errors only here
        if processor is not None and set(keys["video"]) & set(dataset.column_names or ()):
            refuse_single_image_models(processor())
        options = row_rules(arguments, image_root(arguments, split, dataset), processor and processor()) | rules
        return prepare_rows(dataset, split=split, keys=keys, **options)


def row_rules(arguments: DataArguments, root: Path, processor: Any) -> dict[str, Any]:
    """Return the arguments of `RowOptions` that follow from flags, data folder and model.

    Args:
        arguments: flags.
        root: folder of relative image paths.
        processor: processor of the model, or None.
    """
    return {
        "root": root,
        "system_prompt": load_system_prompt(arguments),
        "video_fps": arguments.video_fps,
        "max_video_frames": arguments.max_video_frames,
        "special": None if processor is None else special_tokens(processor),
        "images": arguments.image_limits(),
    }


def image_root(arguments: DataArguments, split: str, rows: Any) -> Path:
    """Return the root folder for relative image and video paths of `rows`; paths may not leave it."""
    if arguments.image_dir == SHARED:
        return shared_folder(rows, keys_of(**vars(arguments)))
    if arguments.image_dir is not None:
        return Path(arguments.image_dir).absolute()
    if arguments.data_files:
        files = parse_data_files(arguments.data_files)
        return files.get(split, next(iter(files.values())))[0].absolute().parent
    return Path(arguments.dataset_path or downloaded()).absolute()


def load_adapter_config(name: str, revision: str | None) -> PeftConfig | None:
    """Load the configuration of a LoRA adapter; return None for a full model."""
    with raise_config_errors(name):
        is_adapter = find_adapter_config_file(name, revision=revision) is not None
        return PeftConfig.from_pretrained(name, revision=revision) if is_adapter else None


def refuse_adapter(model: str) -> None:
    """Raise `ConfigError` if a folder holds a LoRA adapter without the model, which transformers does not recognise."""
    folder = Path(model)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ConfigError(f"{model} is a LoRA adapter: run vgr-trl merge {model}, then give {folder / 'merged'}.")


def load_processor(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load the processor (or tokenizer) saved with a model or adapter, else with the adapter's base model.

    Args:
        name: a folder or a hub name.

    Raises:
        ConfigError: there is none, it has no chat template, or it needs torchvision, which is not installed.
    """
    adapter, files = load_adapter_config(name, revision), ("processor_config.json", "tokenizer_config.json")
    if adapter is not None and not any((Path(name) / file).exists() for file in files):
        name, revision = str(adapter.base_model_name_or_path), adapter.revision
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    with raise_config_errors(name), naming_torchvision(name):
        processor = AutoProcessor.from_pretrained(name, padding_side="left", **options)
    if processor.chat_template is None:
        raise ConfigError(f"{name} has no chat template: give its instruct version, or save one with its tokenizer.")
    return processor


MAX_STAGES_ON_A_PAGE = 4  # with more stages, --help lists the stages only
# Stages that define a method by its rewards, measurements and credit.
METHOD_STAGES = "reward", "credit", "plugin", "perturbation", "measure", "noisy", "blind"


def _spellings(name: str) -> list[str]:
    return [f"--{name}", f"--{name.replace('_', '-')}"]


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Show each flag once, and its default unless it is None."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return action.option_strings[0]

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class _Help(argparse.Action):
    """Print the options of a stage (`--help kl`) or all stages (`--help-all`), or a line per stage if they are many."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if isinstance(values, str) and values not in parser.stages:
            raise ConfigError(f"--help has no group {values}: give one of {', '.join(parser.stages)}.")
        if not (self.const or values) and len(parser.stages) > MAX_STAGES_ON_A_PAGE:
            print("\nOptions, by group:")
            for name, group in parser.stages.items():
                title = shorten(str(group.title).rpartition(" [")[0], 72, placeholder=" …")
                print(f"  {name:<14}{len(group._group_actions):>3}  {title}")
            print(f"\n{parser.prog} --help kl shows one group, --help-all every option.")
            parser.exit()
        parser._action_groups = [parser.stages[values]] if values else list(parser.stages.values())
        parser.print_help()
        parser.exit()


class _Parser(HfArgumentParser):
    """Group options by stage; raise `ConfigError` instead of printing hundreds of flags."""

    def __init__(self, groups: Sequence[Any], command: str) -> None:
        self.stages: dict[str, argparse._ArgumentGroup] = {}
        super().__init__(
            groups,
            prog=f"vgr-trl {command}",
            usage=f"vgr-trl {command} [--config FILE.yaml] [--flag value ...]",
            allow_abbrev=False,
            add_help=False,
            formatter_class=partial(_Formatter, max_help_position=32),
        )
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf)")  # argparse takes -1e-05 for a flag
        if command == "train":
            self.set_defaults(logging_steps=1)
        self.hints = {name: hint for group in groups for name, hint in get_type_hints(group).items()}
        self.options: dict[str, argparse.Action] = {}
        for action in self._actions:
            if self.options.setdefault(action.dest, action) is not action:
                action.help = argparse.SUPPRESS  # --no_x of x
            elif action.type is string_to_bool:
                action.nargs, action.const = "?", True  # `--flag` alone means true, also if the default is None
        for alias, name in SPELLINGS.items():
            if name in self.options:
                self._option_string_actions |= dict.fromkeys(_spellings(alias), self.options[name])
        if (loss := self.options.get("loss_type")) is not None:
            hidden: dict[str, Any] = {"nargs": "?", "const": True, "help": argparse.SUPPRESS}
            self.add_argument(*_spellings(SEGMENTED), type=string_to_bool, **hidden)
            read: Any = loss.type
            loss.type = lambda text: read(LOSS_TYPES.get(text, text))
        self.add_argument("--config")
        self.add_argument("--help", "-h", action=_Help, nargs="?", const=False)
        self.add_argument("--help-all", "--help_all", action=_Help, nargs=0, const=True)

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        """Add an argument group per dataclass that declares options, titled by its docstring."""
        hints, left = get_type_hints(dtype), {field.name: field for field in fields(dtype) if field.init}
        for base in dtype.__mro__:
            for name in inspect.get_annotations(base):
                if (field := left.pop(name, None)) is None:
                    continue
                if base.__module__.startswith("vgr_trl."):
                    stage = re.sub("(Options|Arguments|Config)$", "", base.__name__).lower()
                    title = re.split(r"[;:(]|\.?\n|\.$", base.__doc__ or stage)[0].strip()
                else:
                    stage, title = "trl", "TRL and transformers"
                section = self.stages.get(stage) or self.add_argument_group(f"{title} [{stage}]")
                self.stages[stage], field.type = section, hints[name]
                self._parse_dataclass_field(section, field)  # type: ignore[arg-type]

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        """Drop early weights that a flag switches off."""
        known, rest = super().parse_known_args(*arguments, **options)
        if vars(known).get(SEGMENTED) is False:
            known.early_reward_weights = None
        return known, rest

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Accept several numbers in a word, as in (0.5,2.0)."""
        if action.nargs == "+" and action.type in (int, float):
            arg_strings = [number for word in arg_strings for number in re.split(r"\s*,\s*", word.strip("()[] "))]
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError`."""
        message = re.sub(r"^argument (?:-\w/)?(--\w+)[^:]*", r"\1", message)
        raise ConfigError(f"{message}; {self.prog} --help describes the flags.")

    def to_words(self, values: Mapping[str, Any]) -> list[str]:
        """Convert options of a file to command-line words; set values without a word for them as defaults."""
        words = []
        for name, value in values.items():
            action = self.options[name]
            if isinstance(value, list) and value and action.nargs == "+":
                words += [f"--{name}", *map(str, value)]
            elif isinstance(value, bool) and action.type not in (int, float, string_to_bool):
                action.default = value  # scale_rewards: false, share_prompts: on
            elif isinstance(value, str | int | float):
                words.append(f"--{name}={value}")
            else:
                check_value(name, value, self.hints[name])
                action.default = value
        return words


def parse(groups: Sequence[Any], command: str, argv: Sequence[str], ignored: Collection[str] = ()) -> tuple[Any, ...]:
    """Parse flags, `--config x.yaml` and `--recipe`, in this order of precedence, into dataclasses.

    Args:
        groups: dataclasses of options.
        command: name for messages, and for defaults of its own.
        ignored: options of other commands, skipped with a message; the file's `reward_funcs` is skipped with them.

    Raises:
        ConfigError: an option is refused by this library, TRL or transformers.
    """
    parser = _Parser(groups, command)
    known_flags, rest = parser.parse_known_args(argv)
    flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
    left_out = [*map(_option_name, flags)]
    typed = [_option_name(word) for word in argv if word.startswith("--")]
    if unknown := [name for name in left_out if name not in ignored]:
        named = f"Unknown flag{'s' * (len(unknown) > 1)} {', '.join(f'--{name}' for name in unknown)}."
        raise ConfigError(f"{named}{explain_unknown(unknown, typed, parser.options, '--')} --help-all lists the flags.")
    if rest and not rest[0].startswith("--"):
        raise ConfigError(f"{rest[0]!r} is not a flag or its value: remove it, or quote the value that it is part of.")
    stated = rename_options(dict.fromkeys(typed), "The command line")
    if SEGMENTED in typed and not {"early_reward_weights", "config", "recipe"} & stated.keys():
        raise ConfigError(f"--{SEGMENTED} needs --early_reward_weights: give them, or drop the flag.")
    values = {} if known_flags.config is None else _read_config_file(Path(known_flags.config), parser.options, ignored)
    recipe = vars(known_flags).get("recipe") or values.get("recipe")
    if recipe is not None:
        options = _check_names(load_recipe(str(recipe)), f"The recipe {recipe}", parser.options)
        method = {action.dest for stage in METHOD_STAGES for action in parser.stages[stage]._group_actions}
        values = override_recipe(str(recipe), options, drop_displaced(values, stated), str(known_flags.config), method)
    if left_out:
        print(f"Without effect here: {', '.join(left_out)}.", file=sys.stderr)
    words = [*parser.to_words(drop_displaced(values, stated)), *argv]
    with raise_config_errors():
        made = parser.parse_args_into_dataclasses(words, return_remaining_strings=True, look_for_args_file=False)
        return made[: len(groups)]


def _option_name(flag: str) -> str:
    return flag[2:].partition("=")[0].replace("-", "_")


def _read_config_file(file: Path, accepted: Collection[str], ignored: Collection[str]) -> dict[str, Any]:
    """Read the options of the `--config` file, and export its environment variables (`env`)."""
    values = read_options(file, f"The file {file}")
    os.environ.update({name: str(value) for name, value in (values.pop("env", None) or {}).items()})
    left_out = [name for name in values if name not in accepted and name in ignored]
    if left_out:
        left_out += ["reward_funcs"] * ("reward_funcs" in values)
        print(f"Without effect here: {', '.join(left_out)}.", file=sys.stderr)
    return _check_names({name: value for name, value in values.items() if name not in left_out}, str(file), accepted)


def _check_names(values: dict[str, Any], where: str, accepted: Collection[str]) -> dict[str, Any]:
    """Return the options of a file under their own names; raise `ConfigError` for an unknown option."""
    values = rename_options(values, where)
    if unknown := [str(name) for name in values if name not in accepted]:
        named = f"{', '.join(unknown)}, which {'is not an option' if len(unknown) == 1 else 'are not options'}."
        explained = explain_unknown(unknown, [*map(str, values)], accepted)
        raise ConfigError(f"{where} has {named}{explained} --help-all lists the options.")
    for name, value in values.items():
        if value is False and name.endswith("_strategy"):
            raise ConfigError(f'{where} has {name}: no, which YAML reads as false: write "no" in quotes.')
    return values


def convert_flags(command: str, argv: Sequence[str]) -> tuple[str, list[str], dict[str, str]]:
    """Convert a configuration of EasyR1, MTRL or verl among the flags into flags of this library, and print the table.

    Returns the command (`evaluate` instead of `train` if `val_only` is set), its flags, and option -> key of the file.

    Raises:
        ConfigError: a key is unknown or unsupported, and `--ignore_unknown_keys` is not given.
    """
    stated, kept = read_configuration(argv)
    if stated is None:
        return command, list(argv), {}
    converted = convert(stated, int(os.environ.get("WORLD_SIZE", "1")))
    flags = {word.partition("=")[0] for word in kept}
    evaluates = command == "evaluate" or bool(converted["trainer.val_only"])
    if os.environ.get("RANK", "0") == "0":
        print(converted.format_table("--verbose" in flags), flush=True)
    converted.check(flags, evaluates)
    for name in ("WANDB_PROJECT", "SWANLAB_PROJ_NAME", "MLFLOW_EXPERIMENT_NAME"):
        os.environ.setdefault(name, str(converted.options["project"]))
    options = converted.options
    if evaluates:
        names = {field.name for group in (DataArguments, EvaluationArguments) for field in fields(group)}
        options = {name: value for name, value in converted.evaluation_options().items() if name in names}
        command, kept = "evaluate", [word for word in kept if word != "--ignore_unknown_keys"]
    words = []
    for name, value in options.items():
        items = value if isinstance(value, list) else [value]
        words += [f"--{name}", *(json.dumps(item) if isinstance(item, dict | bool) else str(item) for item in items)]
    keys = {option: converted.name(key) for key, names in converted.options_by_key.items() if key for option in names}
    return command, [*words, *kept], keys
