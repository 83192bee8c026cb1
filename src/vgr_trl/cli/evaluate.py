"""`vgr-trl evaluate`: accuracy, mean@k, pass@k and format rate of a model, without training."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vgr_trl.cli.arguments import DataArguments, one_sentence, parse
from vgr_trl.cli.loading import load_for_inference, load_processor_for_inference, load_rows
from vgr_trl.data.rows.skipped import report_skipped
from vgr_trl.errors import ConfigError
from vgr_trl.evaluation import Evaluation, Scores, evaluate


@dataclass
class EvaluationArguments:
    """What is evaluated, and how."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Checkpoint folder, LoRA adapter folder or hub name."}
    )
    model_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a hub model."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Allow a model that brings its own code."})
    dtype: str = field(default="auto", metadata={"help": "auto, bfloat16, float16 or float32."})
    num_samples: int = field(default=8, metadata={"help": "k of mean@k and pass@k; 0: greedy only."})
    temperature: float = field(default=1.0, metadata={"help": "Of sampling, above 0."})
    max_completion_length: int = field(default=512, metadata={"help": "In tokens."})
    batch_size: int = field(default=16, metadata={"help": "Questions per generation call."})
    blank_images: bool = field(default=False, metadata={"help": "Replace images by grey: what is answered blindly?"})
    group_by: str | None = field(
        default=None, metadata={"help": "Column; scores are given for each of its values too."}
    )
    seed: int = field(default=0, metadata={"help": "Of sampling."})
    output_file: str | None = field(default=None, metadata={"help": "Write the numbers there, as JSON."})
    save_completions: bool = field(default=False, metadata={"help": "Add every completion to the JSON."})


def main(argv: Sequence[str] | None = None) -> int:
    """Parse flags (or `--config x.yaml`), evaluate the split `--dataset_test_split`, print a table, and return 0."""
    data, options = parse((DataArguments, EvaluationArguments), "evaluate", argv)
    if options.output_file:
        _refuse_unwritable(Path(options.output_file))
    result = run(data, options)
    Console().print(scores_table(result))
    if options.output_file:
        write_result(result, Path(options.output_file), options.save_completions)
    return 0


def _refuse_unwritable(path: Path) -> None:
    """Refuse a file that cannot be written, before the work whose numbers it is to hold."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"output_file is {path}, which cannot be written ({error}): choose another.") from error


def run(data: DataArguments, options: EvaluationArguments) -> Evaluation:
    """Load the model and the questions that the options name, and evaluate; rows left out are listed in a file."""
    if not options.model_name_or_path:
        raise ConfigError("model_name_or_path is missing: give a checkpoint folder, an adapter folder or a hub name.")
    if data.dataset_streaming:
        raise ConfigError("dataset_streaming is on, but evaluate reads a whole split: remove the flag.")
    processor_only = partial(
        load_processor_for_inference,
        options.model_name_or_path,
        revision=options.model_revision,
        trust_remote_code=options.trust_remote_code,
    )
    with one_sentence():
        rows, left_out = load_rows(
            data, data.dataset_test_split, needs_solution=True, limit=data.max_test_rows, processor=processor_only
        )
    if left_out:
        report_skipped(left_out, Path(options.output_file or "evaluate.json").with_suffix(".skipped.jsonl"))
    with one_sentence():
        model, processor = load_for_inference(
            options.model_name_or_path,
            dtype=options.dtype,
            revision=options.model_revision,
            trust_remote_code=options.trust_remote_code,
        )
    return evaluate(
        model,
        processor,
        rows,
        num_samples=options.num_samples,
        temperature=options.temperature,
        max_completion_length=options.max_completion_length,
        batch_size=options.batch_size,
        blank_images=options.blank_images,
        group_by=options.group_by,
        seed=options.seed,
    )


def scores_table(result: Evaluation) -> Table:
    """Return the scores, all and by group, as a table."""
    table = Table()
    for column in ("", "questions", "accuracy", f"mean@{result.k}", f"pass@{result.k}", "format"):
        table.add_column(column, justify="left" if not column else "right")

    def add(name: str, scores: Scores) -> None:
        rates = (scores.accuracy, scores.mean_at_k, scores.pass_at_k, scores.format)
        table.add_row(name, str(scores.questions), *("-" if rate is None else f"{rate:.3f}" for rate in rates))

    add("all", result)
    for name, scores in result.groups.items():
        add(name, scores)
    return table


def write_result(result: Evaluation, path: Path, completions: bool) -> None:
    """Write the numbers, and with `completions` every completion, to `path`."""
    path.write_text(json.dumps(result.to_dict(records=completions), indent=2, default=str) + "\n", encoding="utf-8")
