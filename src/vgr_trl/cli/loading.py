"""Models, processors and data sets as the commands load them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoProcessor

from vgr_trl.cli.arguments import DataArguments
from vgr_trl.data.load import load_split, parse_data_files
from vgr_trl.data.prompts import SYSTEM_PROMPT
from vgr_trl.data.schema import SkippedRow, prepare_rows
from vgr_trl.demo.tiny_vlm import load_processor as load_demo_processor
from vgr_trl.errors import ConfigError


def load_processor(model: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Return the processor (or tokenizer) saved with `model`, a folder or a hub name."""
    if (processor := load_demo_processor(model)) is not None:
        return processor
    return AutoProcessor.from_pretrained(
        model, revision=revision, padding_side="left", trust_remote_code=trust_remote_code
    )


def load_model(model: str, *, dtype: str = "auto", revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Return the model of a checkpoint or hub name, ready for inference; a LoRA adapter is put on its base model."""
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    adapter_config = Path(model) / "adapter_config.json"
    if adapter_config.is_file():
        from peft import PeftModel

        base = json.loads(adapter_config.read_text(encoding="utf-8"))["base_model_name_or_path"]
        if not base:
            raise ConfigError(f"The adapter in {model} does not say which base model it belongs to.")
        return PeftModel.from_pretrained(load_model(base, dtype=dtype), model)
    config = AutoConfig.from_pretrained(model, **options)
    architecture = getattr(transformers, config.architectures[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return architecture.from_pretrained(model, config=config, dtype=dtype, **options).to(device)


def base_of(model: str) -> str:
    """Return the base model of a LoRA adapter, else `model` itself."""
    adapter_config = Path(model) / "adapter_config.json"
    if adapter_config.is_file():
        return json.loads(adapter_config.read_text(encoding="utf-8"))["base_model_name_or_path"]
    return model


def read_system_prompt(path: str | None) -> str | None:
    """Return the system prompt of the file, None for an empty one, the standard one without a file."""
    if path is None:
        return SYSTEM_PROMPT
    if not Path(path).is_file():
        raise ConfigError(f"system_prompt_file is {path}, which does not exist.")
    return Path(path).read_text(encoding="utf-8").strip() or None


def load_rows(
    arguments: DataArguments, split: str, *, needs_solution: bool, limit: int | None
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
    )


def _image_root(arguments: DataArguments, split: str) -> Path:
    if arguments.data_files:
        return parse_data_files(arguments.data_files)[split].parent
    return Path(arguments.dataset_path) if arguments.dataset_path else Path()
