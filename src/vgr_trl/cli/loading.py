"""Models, processors and data sets as the commands load them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftConfig, PeftModel
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor
from transformers.utils import find_adapter_config_file

from vgr_trl.cli.arguments import DataArguments
from vgr_trl.data.load import load_split, parse_data_files
from vgr_trl.data.prompts import SYSTEM_PROMPT
from vgr_trl.data.schema import SkippedRow, prepare_rows
from vgr_trl.demo.tiny_processor import load_processor as load_demo_processor
from vgr_trl.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32")


def load_processor(model: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Return the processor (or tokenizer) saved with `model`, a folder or a hub name.

    Raises:
        ConfigError: there is none.
    """
    if (processor := load_demo_processor(model)) is not None:
        return processor
    with _refusing(model):
        return AutoProcessor.from_pretrained(
            model, revision=revision, padding_side="left", trust_remote_code=trust_remote_code
        )


def load_for_inference(
    name: str, *, dtype: str = "auto", revision: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """Return the model and the processor of a checkpoint, a LoRA adapter (on its base model) or a hub name.

    Args:
        name: folder or hub name.
        dtype: auto, bfloat16, float16 or float32.
        revision: branch, tag or commit of a hub name.
        trust_remote_code: whether a model may bring its own code.

    Raises:
        ConfigError: it does not exist or cannot be loaded.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}: give one of {', '.join(DTYPES)}.")
    with _refusing(name):
        is_adapter = find_adapter_config_file(name, revision=revision) is not None
    if not is_adapter:
        model = _load_model(name, dtype, revision, trust_remote_code)
        return model, load_processor(name, revision, trust_remote_code)
    with _refusing(name):
        adapter = PeftConfig.from_pretrained(name, revision=revision)
    if not adapter.base_model_name_or_path:
        raise ConfigError(f"The adapter in {name} does not say which base model it belongs to.")
    base = _load_model(adapter.base_model_name_or_path, dtype, adapter.revision, trust_remote_code)
    with _refusing(name):
        model = PeftModel.from_pretrained(base, name, revision=revision)
    if any((Path(name) / file).exists() for file in ("processor_config.json", "tokenizer_config.json")):
        return model, load_processor(name, revision, trust_remote_code)
    return model, load_processor(adapter.base_model_name_or_path, adapter.revision, trust_remote_code)


def _load_model(name: str, dtype: str, revision: str | None, trust_remote_code: bool) -> Any:
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    with _refusing(name):
        config = AutoConfig.from_pretrained(name, **options)
        architecture: Any = getattr(transformers, (config.architectures or [""])[0], None) or AutoModelForCausalLM
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return architecture.from_pretrained(name, config=config, dtype=dtype, **options).to(device)


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Turn what transformers and the hub raise for a missing or broken model into one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{name} cannot be loaded ({cause}): give a model folder or a hub name.") from error


def read_system_prompt(path: str | None) -> str | None:
    """Return the system prompt of the file, None for an empty one, the standard one without a file."""
    if path is None:
        return SYSTEM_PROMPT
    if not Path(path).is_file():
        raise ConfigError(f"system_prompt_file is {path}, which does not exist.")
    return Path(path).read_text(encoding="utf-8").strip() or None


def load_rows(
    arguments: DataArguments,
    split: str,
    *,
    needs_solution: bool,
    limit: int | None,
    on_skipped: Callable[[SkippedRow], None] | None = None,
) -> tuple[Any, list[SkippedRow]]:
    """Return the usable rows of a split, with prompts, and the rows left out."""
    dataset = load_split(
        split,
        dataset_name=arguments.dataset_name,
        dataset_config=arguments.dataset_config,
        dataset_path=arguments.dataset_path,
        data_files=arguments.data_files,
        streaming=arguments.dataset_streaming,
    )
    if limit is not None:
        dataset = (
            dataset.take(limit) if arguments.dataset_streaming else dataset.select(range(min(limit, len(dataset))))
        )
    return prepare_rows(
        dataset,
        split=split,
        root=_image_root(arguments, split),
        needs_solution=needs_solution,
        system_prompt=read_system_prompt(arguments.system_prompt_file),
        on_skipped=on_skipped,
    )


def _image_root(arguments: DataArguments, split: str) -> Path:
    if arguments.data_files:
        return parse_data_files(arguments.data_files)[split].parent
    return Path(arguments.dataset_path) if arguments.dataset_path else Path()
