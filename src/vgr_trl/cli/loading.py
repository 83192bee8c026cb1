"""Models, processors and data sets as the commands load them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftConfig, PeftModel
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor
from transformers.utils import find_adapter_config_file

from vgr_trl.cli.arguments import DataArguments
from vgr_trl.data.columns import keys_of
from vgr_trl.data.images import VideoOptions, downloaded, refuse_single_image_models
from vgr_trl.data.load import load_split
from vgr_trl.data.prompts import SYSTEM_PROMPT, SYSTEM_PROMPTS, QuestionTemplate, SystemTemplate, special_tokens
from vgr_trl.data.read import HUB_NAME, parse_data_files, readable, why_not_on_hub
from vgr_trl.data.rows import SkippedRow, prepare_rows
from vgr_trl.utils import ConfigError

NO_PROMPT = "none"


def load_processor(model: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Return the processor (or tokenizer) saved with `model`, a folder or a hub name.

    Raises:
        ConfigError: there is none.
    """
    with _named(model):
        return AutoProcessor.from_pretrained(
            model, revision=revision, padding_side="left", trust_remote_code=trust_remote_code
        )


def load_processor_for_inference(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Return the processor with which `load_for_inference` would load `name`, without its model."""
    adapter, files = _adapter(name, revision), ("processor_config.json", "tokenizer_config.json")
    if adapter is not None and not any((Path(name) / file).exists() for file in files):
        name, revision = str(adapter.base_model_name_or_path), adapter.revision
    return load_processor(name, revision, trust_remote_code)


def load_for_inference(
    name: str, *, dtype: str = "auto", revision: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """Return the model and the processor of a checkpoint, a LoRA adapter (on its base model) or a hub name.

    Raises:
        ConfigError: it does not exist or cannot be loaded.
    """
    adapter = _adapter(name, revision)
    base = name if adapter is None else str(adapter.base_model_name_or_path)
    options = {"revision": adapter.revision if adapter else revision, "trust_remote_code": trust_remote_code}
    with _named(base):
        config = AutoConfig.from_pretrained(base, **options)
        architecture: Any = getattr(transformers, (config.architectures or [""])[0], None) or AutoModelForCausalLM
        model = architecture.from_pretrained(base, config=config, dtype=dtype, **options)
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    if adapter is not None:
        with _named(name):
            model = PeftModel.from_pretrained(model, name, revision=revision)
    return model, load_processor_for_inference(name, revision=revision, trust_remote_code=trust_remote_code)


def _adapter(name: str, revision: str | None) -> PeftConfig | None:
    with _named(name):
        found = find_adapter_config_file(name, revision=revision) is not None
        return PeftConfig.from_pretrained(name, revision=revision) if found else None


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Turn what transformers and the hub raise for a missing or broken model into one sentence."""
    refuse_missing_folder(name)
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{name} cannot be loaded ({cause}): give a model folder or a hub name.") from error


def refuse_missing_folder(name: str) -> None:
    """Raise `ConfigError` for a path that does not exist and is no name in the cache or on the hub."""
    path = Path(name)
    if path.exists():
        return
    why = why_not_on_hub(name, "model") if HUB_NAME.fullmatch(name) else ""
    if why is None:
        return
    if (expanded := path.expanduser()) != path and expanded.exists():
        hint = f": write {expanded}, since only a shell knows what ~ is."
    else:
        beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
        nearest = get_close_matches(path.name, beside, n=1)
        hint = f". Did you mean {path.parent / nearest[0]}?" if nearest else ": give a model folder or a hub name."
    raise ConfigError(f"There is no model folder {name}{hint}{f' (from the hub: {why})' if why else ''}")


def system_prompt_of(arguments: DataArguments) -> str | SystemTemplate | None:
    """Return the system prompt that the flags name: a file's, or the standard one in their language."""
    if arguments.question_template_file is not None:
        name = f"question_template_file {arguments.question_template_file}"
        return QuestionTemplate(_text_of("question_template_file", arguments.question_template_file), name)
    if arguments.system_prompt_file is not None:
        return read_system_prompt(arguments.system_prompt_file)
    return SYSTEM_PROMPTS[arguments.prompt_language or "en"]


def read_system_prompt(path: str | None) -> str | SystemTemplate | None:
    """Return the system prompt of the file, None for an empty one or `none`, the standard one without a file.

    Raises:
        ConfigError: there is no such file, or it holds neither a text nor a template.
    """
    if path is None:
        return SYSTEM_PROMPT
    text = "" if path == NO_PROMPT else _text_of("system_prompt_file", path)
    return SystemTemplate(text, f"system_prompt_file {path}") if text else None


def _text_of(option: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig").strip()
    except FileNotFoundError as error:
        raise ConfigError(f"{option} is {path}, which does not exist.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} is {path}, which is not a readable UTF-8 text ({error}).") from error


def tested(arguments: DataArguments) -> DataArguments:
    """Return the arguments such that they name the data to evaluate on, where these are other data."""
    test = arguments.test_dataset
    if test is None:
        return arguments
    given: dict[str, Any] = {"dataset_name": None, "dataset_path": None, "data_files": None, "dataset_config": None}
    if Path(test).is_dir():
        given["dataset_path"] = test
    elif Path(test).is_file():
        given["data_files"] = f"{arguments.dataset_test_split}={test}"
    else:
        given["dataset_name"] = test
    return replace(arguments, **given, test_dataset=None)


def load_rows(
    arguments: DataArguments,
    split: str,
    *,
    needs_solution: bool,
    limit: int | None,
    processor: Callable[[], Any] | None = None,
    on_skipped: Callable[[SkippedRow], None] | None = None,
    shuffle_seed: int | None = None,
    boxes: bool = False,
) -> tuple[Any, list[SkippedRow]]:
    """Return the usable rows of a split, with prompts, and the rows left out.

    Args:
        limit: the first so many rows only.
        processor: gives the model's processor, whose special tokens no text of a row may hold, and which must take
            several images if the data have videos.
        on_skipped: called for each row that a stream leaves out.
        shuffle_seed: of the order of a stream; None: as it is. A data set keeps its order.
        boxes: whether something reads the boxes of rows.

    Raises:
        ConfigError, DataError: an option or the data cannot be used.
    """
    system_prompt = system_prompt_of(arguments)
    dataset = load_split(
        split,
        dataset_name=arguments.dataset_name,
        dataset_config=arguments.dataset_config,
        dataset_path=arguments.dataset_path,
        data_files=arguments.data_files,
        streaming=arguments.dataset_streaming,
        with_folders=arguments.image_dir is None,
    )
    keys = keys_of(**vars(arguments))
    if limit is not None:
        dataset = dataset.take(limit if arguments.dataset_streaming else min(limit, len(dataset)))
    source = arguments.dataset_name or arguments.dataset_path or arguments.data_files
    with readable(source, "the data"):  # of a stream, what is damaged is found only now
        if processor is not None and set(keys.video) & set(_column_names(dataset)):
            refuse_single_image_models(processor())
        return prepare_rows(
            dataset,
            split=split,
            root=image_root(arguments, split),
            needs_solution=needs_solution,
            system_prompt=system_prompt,
            videos=VideoOptions(arguments.video_fps, arguments.max_video_frames),
            on_skipped=on_skipped,
            shuffle_seed=shuffle_seed,
            special=None if processor is None else special_tokens(processor()),
            keys=keys,
            images=arguments.image_rule(),
            boxes=boxes,
        )


def image_root(arguments: DataArguments, split: str) -> Path:
    """Return the folder that relative paths of images and videos start from, and that none leads out of."""
    if arguments.image_dir is not None:
        return Path(arguments.image_dir).absolute()
    if arguments.data_files:
        files = parse_data_files(arguments.data_files)
        return files.get(split, next(iter(files.values())))[0].absolute().parent
    return Path(arguments.dataset_path or downloaded()).absolute()


def _column_names(dataset: Any) -> list[str]:
    return list(dataset.column_names if dataset.column_names is not None else next(iter(dataset), {}))
