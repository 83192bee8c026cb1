"""`vgr-trl evaluate`: accuracy, baselines, mean@k, pass@k and format rate of models, without training."""

import base64
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from vgr_trl.cli.arguments import (
    TRAINING_OPTIONS,
    DataArguments,
    EvaluationArguments,
    evaluation_source,
    keep_offline,
    load_adapter_config,
    load_processor,
    load_rows,
    parse,
    raise_config_errors,
    refuse_adapter,
)
from vgr_trl.data.checked_rows import SkippedRow, report_skipped
from vgr_trl.data.images import images_of
from vgr_trl.data.prompts import PromptTemplate, to_parts
from vgr_trl.errors import ConfigError, DataError, MissingSplitError
from vgr_trl.evaluation import Evaluation, evaluate, print_scores
from vgr_trl.reporting.recorder import read_row_images
from vgr_trl.reporting.records import find_identity, refuse_unwritable

EVALUATE_OPTIONS = ("num_samples", "temperature", "max_completion_length", "batch_size", "blank_images", "seed")


def main(argv: Sequence[str]) -> int:
    """Parse flags (or `--config x.yaml`, also that of a training), evaluate `--dataset_test_split`, print a table."""
    data, options = parse((DataArguments, EvaluationArguments), "evaluate", argv, TRAINING_OPTIONS)
    output = Path(options.output_file) if options.output_file else None
    if options.save_completions and output is None:
        raise ConfigError("save_completions needs a file: give --output_file FILE.")
    if output is not None:
        refuse_unwritable(output, "output_file", mark=b'"mean_at_k": ')  # before the evaluation, not after it
    results = evaluate_models(data, options)
    print_scores(results)
    if output is not None:
        values = {name: result.to_dict(records=options.save_completions) for name, result in results.items()}
        content = next(iter(values.values())) if len(values) == 1 else {"models": values}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    return 0


def evaluate_models(data: DataArguments, options: EvaluationArguments) -> dict[str, Evaluation]:
    """Evaluate each model on the same questions; list skipped rows in a file."""
    if not options.model_name_or_path:
        raise ConfigError("model_name_or_path is missing: give a checkpoint folder, an adapter folder or a hub name.")
    if data.dataset_streaming:
        raise ConfigError("dataset_streaming is on, but evaluate reads a whole split: remove the flag.")
    rewards = options.load(options.reward_funcs, options.max_completion_length, options.soft_punish_cache)
    measured = {name: vars(options)[name] for name in EVALUATE_OPTIONS}
    loading: dict[str, Any] = {"revision": options.model_revision, "trust_remote_code": options.trust_remote_code}
    source, split, limit = evaluation_source(data), data.dataset_test_split, data.max_test_rows
    keep_offline(source.dataset_name, *options.model_name_or_path)
    questions: dict[str, tuple[Any, list[SkippedRow]]] = {}
    results: dict[str, Evaluation] = {}
    for name in dict.fromkeys(options.model_name_or_path):  # report a missing model before evaluating any
        with raise_config_errors():
            processor = partial(load_processor, name, **loading)
            rules = {"needs_solution": True, "decodes": True}  # skip unreadable rows instead of replacing them
            prompt = {} if data.prompt_options() else find_trained_prompt(name)
            try:
                questions[name] = load_rows(source, split, limit=limit, processor=processor, **rules, **prompt)
            except MissingSplitError as error:
                wrong = f"dataset_test_split is {split!r}, but the data have {', '.join(error.splits)}"
                raise DataError(f"{wrong}: give --dataset_test_split {' or '.join(error.splits)}.") from error
    for name, (rows, _) in questions.items():
        with raise_config_errors():
            model, loaded = load_for_inference(name, dtype=options.dtype, **loading)
        group_by, blind = _choose_group_column(options.group_by, rows), options.blind_baseline
        results[name] = evaluate(model, loaded, rows, blind=blind, reward_funcs=rewards, group_by=group_by, **measured)
        for record, row in zip(results[name].records if options.save_completions else (), rows, strict=False):
            record |= _report_fields(row)
    if left_out := next((skipped for _, skipped in questions.values() if skipped), None):
        report_skipped(left_out, Path(options.output_file or "evaluate.json").with_suffix(".skipped.jsonl"))
    return results


def find_trained_prompt(model: str) -> dict[str, Any]:
    """Return the argument `system_prompt` of `load_rows` that a run was trained with, and print a line about it.

    Args:
        model: `output_dir` of `train`, or a folder in it. For other models, the result is empty.
    """
    identity = find_identity(Path(model))
    run = {} if identity is None else json.loads(identity.read_text(encoding="utf-8"))
    if "system_prompt" not in run:
        return {}
    prompt = run["system_prompt"] and PromptTemplate(**run["system_prompt"])
    kind = "no system prompt" if prompt is None else f"this {prompt.role} prompt: {prompt.text[:100]!r}"
    print(f"{model} was trained with {kind}. Evaluating with the same.", file=sys.stderr)
    return {"system_prompt": prompt}


def _report_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompt text and base64 image thumbnails of a row, for `vgr-trl report`."""
    pictures, thumbnails = read_row_images(row, images_of(row), [])
    parts = [part for turn in row["prompt"] if turn["role"] != "system" for part in to_parts(turn["content"])]
    images = []
    for picture in pictures:
        thumbnail = base64.b64encode(thumbnails[str(picture.file)]).decode()
        images.append({"file": picture.file, "width": picture.width, "height": picture.height, "thumbnail": thumbnail})
    return {"prompt": "\n".join(part.get("text") or f"<{part['type']}>" for part in parts), "images": images}


def load_for_inference(
    name: str, *, dtype: str = "auto", revision: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """Load model and processor from a checkpoint, a LoRA adapter (with its base model) or the hub.

    Args:
        name: folder or hub name.
        dtype: dtype of the weights; auto: as saved.
        revision: branch, tag or commit of a hub model.
        trust_remote_code: run Python code that comes with the model.

    Raises:
        ConfigError: it does not exist or cannot be loaded.
    """
    adapter = load_adapter_config(name, revision)
    base = name if adapter is None else str(adapter.base_model_name_or_path)
    options = {"revision": adapter.revision if adapter else revision, "trust_remote_code": trust_remote_code}
    with raise_config_errors(base):
        config = AutoConfig.from_pretrained(base, **options)
        architecture: Any = _find_class(config) or AutoModelForCausalLM
        model = architecture.from_pretrained(base, config=config, dtype=dtype, **options)
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    if adapter is not None:
        with raise_config_errors(name):
            model = PeftModel.from_pretrained(model, name, revision=revision)
    return model, load_processor(name, revision, trust_remote_code)


def _find_class(config: PretrainedConfig) -> Any:
    return getattr(transformers, (config.architectures or [""])[0], None)


def count_parameters(name: str) -> int:
    """Count the parameters of a model folder or hub model from its configuration, without loading weights.

    Raises:
        ConfigError: the model does not exist, or transformers lacks its class.
    """
    refuse_adapter(name)
    with raise_config_errors(name), torch.device("meta"):
        config = AutoConfig.from_pretrained(name)
        make = _find_class(config) or AutoModelForCausalLM.from_config
        return int(make(config).num_parameters())


def _choose_group_column(column: str | None, rows: Any) -> str | None:
    """Return the given column, else `family` or `source` if it has several values."""
    if column is not None:
        return None if column == "none" else column
    several = (name for name in ("family", "source") if name in rows.column_names and len(set(rows[name])) > 1)
    return next(several, None)
