"""`vgr-trl evaluate`: accuracy, baselines, mean@k, pass@k and format rate of models, without training."""

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from trl import ModelConfig

from vgr_trl.cli.arguments import (
    CACHE,
    DataArguments,
    EvaluationArguments,
    RewardArguments,
    RunArguments,
    one_sentence,
    parse,
)
from vgr_trl.cli.loading import load_for_inference, load_processor_for_inference, load_rows, tested
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.rows import report_skipped
from vgr_trl.evaluation import Cache, Evaluation, Scores, evaluate, key_of, model_identity, rows_identity
from vgr_trl.rewards.loading import ScoredFile
from vgr_trl.utils import ConfigError


def scores_table(results: Mapping[str, Evaluation]) -> Table:
    """Return a row for all questions of each model, and one for each group of them; models stand side by side."""
    first = next(iter(results.values()))
    rewards = list(dict.fromkeys(name for result in results.values() for name in result.rewards))
    table = Table()
    for heading in ("", *(["model"] if len(results) > 1 else [])):
        table.add_column(heading, overflow="fold")
    numbers = ["questions", "accuracy", "95 %", "majority", "blind", "unparsable", f"mean@{first.k}", f"pass@{first.k}"]
    for heading in (*numbers, "format", *rewards):
        table.add_column(heading, justify="right", overflow="fold")
    for group in (None, *dict.fromkeys(name for result in results.values() for name in result.groups)):
        for model, result in results.items():
            scores = result if group is None else result.groups.get(group)
            if scores is not None:
                names = [group or "all", *([model] if len(results) > 1 else [])]
                table.add_row(*names, *_cells(scores, rewards), end_section=model == list(results)[-1])
    return table


def _cells(scores: Scores, rewards: list[str]) -> list[str]:
    low, high = scores.interval
    rates = (scores.majority, scores.blind, scores.unparsable, scores.mean_at_k, scores.pass_at_k, scores.format)
    shown = [_rate(rate) for rate in (*rates, *(scores.rewards.get(name) for name in rewards))]
    return [str(scores.questions), _rate(scores.accuracy), f"{low:.3f}–{high:.3f}", *shown]


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse flags (or `--config x.yaml`, also that of a training), evaluate `--dataset_test_split`, print a table."""
    of_training = (RunArguments, RewardArguments, DAPOConfig, ModelConfig)
    ignored = {option.name for group in of_training for option in fields(group)}
    data, options = parse((DataArguments, EvaluationArguments), "evaluate", argv, ignored)
    if options.output_file:
        try:  # before the work whose numbers it is to hold
            Path(options.output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(options.output_file).open("a").close()
        except OSError as error:
            raise ConfigError(f"output_file is {options.output_file}, which cannot be written ({error}).") from error
    results = run(data, options)
    (Console() if sys.stdout.isatty() else Console(width=240)).print(scores_table(results))
    if options.output_file:
        values = {name: result.to_dict(records=options.save_completions) for name, result in results.items()}
        content = next(iter(values.values())) if len(values) == 1 else {"models": values}
        text = json.dumps(content, indent=2, default=str) + "\n"
        Path(options.output_file).write_text(text, encoding="utf-8")
    return 0


def run(data: DataArguments, options: EvaluationArguments) -> dict[str, Evaluation]:
    """Evaluate each model that the options name on the same questions; rows left out are listed in a file."""
    if not options.model_name_or_path:
        raise ConfigError("model_name_or_path is missing: give a checkpoint folder, an adapter folder or a hub name.")
    if data.dataset_streaming:
        raise ConfigError("dataset_streaming is on, but evaluate reads a whole split: remove the flag.")
    rewards = options.load(options.reward_funcs, options.max_completion_length, options.soft_punish_cache)
    elsewhere = ("model_name_or_path", "output_file", "save_completions", "cache_dir", "use_cache")
    settings = {name: value for name, value in asdict(options).items() if name not in elsewhere}
    settings["rewards"] = [
        reward.source if isinstance(reward, ScoredFile) else inspect.getsource(reward)
        for reward in rewards
        if inspect.isfunction(reward) or isinstance(reward, ScoredFile)
    ]
    cache = Cache((Path(options.cache_dir) if options.cache_dir else CACHE) if options.use_cache else None)
    left_out: list[Any] = []
    questions: dict[str, tuple[Any, str]] = {}
    results: dict[str, Evaluation] = {}
    loading: dict[str, Any] = {"revision": options.model_revision, "trust_remote_code": options.trust_remote_code}
    for name in dict.fromkeys(options.model_name_or_path):  # all are looked up before the first answers
        with one_sentence():
            rows, skipped = load_rows(
                tested(data),
                data.dataset_test_split,
                needs_solution=True,
                limit=data.max_test_rows,
                processor=partial(load_processor_for_inference, name, **loading),
            )
            left_out = left_out or skipped
            identity = model_identity(name, options.model_revision)
            questions[name] = rows, key_of(identity, rows_identity(rows), settings)
    for name, (rows, key) in questions.items():
        result = cache.find(key)
        if result is None:
            with one_sentence():
                model, processor = load_for_inference(name, dtype=options.dtype, **loading)
            result = evaluate(
                model,
                processor,
                rows,
                num_samples=options.num_samples,
                temperature=options.temperature,
                max_completion_length=options.max_completion_length,
                batch_size=options.batch_size,
                blank_images=options.blank_images,
                blind=options.blind_baseline,
                reward_funcs=rewards,
                group_by=_group_column(options.group_by, rows),
                seed=options.seed,
            )
            cache.keep(key, result)
        else:
            print(f"{name}: taken from {cache.folder}; --use_cache false measures again.")
        results[name] = result
    if left_out:
        report_skipped(left_out, Path(options.output_file or "evaluate.json").with_suffix(".skipped.jsonl"))
    return results


def _group_column(given: str | None, rows: Any) -> str | None:
    """The column that is asked for, else one of families in which there are several."""
    if given is not None:
        return None if given == "none" else given
    several = (name for name in ("family", "source") if name in rows.column_names and len(set(rows[name])) > 1)
    return next(several, None)
