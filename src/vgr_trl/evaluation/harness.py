"""Results in the layout of lm-evaluation-harness, for tools that read it.

`FOLDER/MODEL/results_TIME.json` and `samples_TASK_TIME.jsonl`, as version 0.4 of the harness writes them
(https://github.com/EleutherAI/lm-evaluation-harness).
"""

import json
import math
import re
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from vgr_trl import __version__
from vgr_trl.evaluation.scores import Evaluation, Scores
from vgr_trl.files import write_whole


def write_harness(folder: Path, model: str, task: str, result: Evaluation, settings: Mapping[str, Any]) -> Path:
    """Write the numbers and every completion, and return the file of the numbers.

    Args:
        folder: of all models.
        settings: of the evaluation, as JSON.
    """
    named = {task: result, **{f"{task}_{_plain(name)}": scores for name, scores in result.groups.items()}}
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H-%M-%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06d}"
    name = _plain(model)
    content = {
        "results": {of: {"alias": of, **_metrics(scores)} for of, scores in named.items()},
        "group_subtasks": {of: [] for of in named},
        "configs": {of: {"task": of, "dataset_path": task, "output_type": "generate_until"} for of in named},
        "versions": dict.fromkeys(named, __version__),
        "n-shot": dict.fromkeys(named, 0),
        "higher_is_better": {
            of: {key.split(",")[0]: True for key in _metrics(scores) if "_stderr" not in key}
            for of, scores in named.items()
        },
        "n-samples": {of: dict.fromkeys(("original", "effective"), scores.questions) for of, scores in named.items()},
        "config": {"model": "vgr_trl", "model_args": f"pretrained={model}", **settings},
        "date": now,
        "model_source": "vgr_trl",
        "model_name": model,
        "model_name_sanitized": name,
    }
    lines = [json.dumps(_sample(index, record), default=str) for index, record in enumerate(result.records)]
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    write_whole(target / f"samples_{task}_{stamp}.jsonl", "".join(f"{line}\n" for line in lines).encode())
    file = target / f"results_{stamp}.json"
    write_whole(file, (json.dumps(content, indent=2, default=str) + "\n").encode())
    return file


def _metrics(scores: Scores) -> dict[str, float]:
    deviation = math.sqrt(scores.accuracy * (1 - scores.accuracy) / max(scores.questions - 1, 1))
    rates = {
        "mean_at_k": scores.mean_at_k, "pass_at_k": scores.pass_at_k, "format": scores.format,
        "parsable": 1 - scores.unparsable, "acc_majority": scores.majority, "acc_blind": scores.blind, **scores.rewards,
    }  # fmt: skip
    measured = {f"{name},none": value for name, value in rates.items() if value is not None}
    return {"acc,none": scores.accuracy, "acc_stderr,none": deviation, **measured}


def _sample(index: int, record: Mapping[str, Any]) -> dict[str, Any]:
    doc = {key: record[key] for key in ("id", "source", "problem", "solution") if key in record}
    prompt = str(record.get("problem", ""))
    return {
        "doc_id": index,
        "doc": doc,
        "target": str(record.get("solution")),
        "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": {"until": []}}},
        "resps": [[record["greedy"]]],
        "filtered_resps": [record["greedy"]],
        "filter": "none",
        "metrics": ["acc"],
        "doc_hash": sha256(json.dumps(doc, sort_keys=True, default=str).encode()).hexdigest(),
        "prompt_hash": sha256(prompt.encode()).hexdigest(),
        "target_hash": sha256(str(record.get("solution")).encode()).hexdigest(),
        "acc": record["correct"],
    }


def _plain(name: str) -> str:
    return re.sub(r"[\"<>:/\|\\?\*\[\]\s]+", "__", name)
