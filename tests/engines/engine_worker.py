"""Run by the tests of this folder in the processes of an engine: three steps with every feature on.

engine_worker.py KIND MODEL QUESTIONS OUTPUT WHAT …     a case, "saved CASE", "CASE from CHECKPOINT", generation or nan
"""

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import engines
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from support.dealt_completions import generate_by_prompt
from support.trainers import BIG_STEPS, config, logged, prompts, vision_trainer, whole_parameters
from transformers import TrainerCallback

SIZES = ((56, 56), (84, 56), (56, 112), (112, 84))  # of images, in turn
TABLE = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))


@dataclass
class Case:
    options: dict
    rewards: tuple = ("accuracy", "vgr_hard_negative")
    lora: bool = False
    drop_images: bool = False


CASES = {name: Case(**row) for name, row in TABLE.items()}


def no_reward(completions, **kwargs):
    return [0.0] * len(completions)


def rows_of(file: str, case: Case) -> Dataset:
    """Questions with images of several sizes; of a mixed case every fourth has none."""
    rows = [dict(row) for row in prompts(file)]
    for number, row in enumerate(rows):
        kept = row["image"] if not case.drop_images or number % 4 != 3 else None
        row["image"] = kept and kept.resize(SIZES[number % 4], Image.Resampling.NEAREST)
        row["bbox"] = [0.0, 0.0, 0.5, 1.0]
    return Dataset.from_list(rows)


def trainer_of(kind: str, case: Case, data: tuple[str, str], output: Path, **changed):
    options = {"max_steps": 3, "gradient_accumulation_steps": 2, "check_pixels": True} | BIG_STEPS | case.options
    options |= {"per_device_train_batch_size": 4 // int(os.environ.get("WORLD_SIZE", "1"))}
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if case.lora else None
    options = config(output, **options | engines.options_of(kind) | changed)
    torch.manual_seed(0)  # an adapter is drawn
    rows = rows_of(data[1], case)
    trainer = vision_trainer(data[0], list(case.rewards), options, rows, model=data[0], peft_config=adapter)
    trainer.model.generate = generate_by_prompt(trainer)
    if kind in engines.SHARDED and trainer.accelerator.num_processes > 1:
        # the model itself cannot generate for rows with and without images there
        trainer.run.dummy_image._refuse_uneven = lambda inputs: None
    return trainer


def run(kind: str, name: str, data: tuple[str, str], output: Path) -> dict:
    """How far the parameters moved, and what was logged; a case that is saved or resumed takes a step more by AdamW."""
    case, _, checkpoint = name.removeprefix("saved ").partition(" from ")
    saves = case != name
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-3}
    folder = output / (f"{kind} resumed {case}" if checkpoint else f"{kind} {name}")
    trainer = trainer_of(kind, CASES[case], data, folder, **options if saves else {})
    start = whole_parameters(trainer)
    try:
        trainer.train(resume_from_checkpoint=checkpoint or None)
    except Exception as error:
        if type(error).__name__ != "ZeRORuntimeException":
            raise
        return {"refused": str(error)}
    assert engines.found_engine(trainer) == kind or checkpoint, "other processes may resume it"
    if saves:
        trainer.save_model(str(folder / "model"))
    end = whole_parameters(trainer)
    return {
        "moved": {name: end[name] - start[name] for name in start}, "end": end,
        "history": [entry for entry in trainer.state.log_history if "reward" in entry],
        "rewards": {key: list(values) for key, values in trainer._logs["rewards"].items()},
        "advantages": list(trainer._logs["advantages"]),
    }  # fmt: skip


def run_generation(kind: str, data: tuple[str, str], output: Path) -> dict:
    """Two steps with a real `generate`, thrice: as it comes; one process ends at once; all end at once, all dead."""
    found = {}
    for name in ("free", "one silent", "all silent"):
        drops = kind not in engines.SHARDED  # which refuse uneven images in generation
        case = replace(CASES["everything"], drop_images=drops)
        if name == "all silent":
            case = replace(case, rewards=(no_reward, "vgr_hard_negative"))
        trainer = trainer_of(kind, case, data, output / f"{kind} {name}", max_steps=2, max_completion_length=8)
        del trainer.model.generate
        if name == "all silent" or (name == "one silent" and trainer.accelerator.process_index == 1):
            words = len(trainer.processing_class.tokenizer)
            eos = trainer.processing_class.tokenizer.eos_token_id
            trainer.generation_config.suppress_tokens = [token for token in range(words) if token != eos]
        trainer.train()
        lengths = [logged(trainer, f"completions/{which}_length") for which in ("min", "max")]
        found[name] = {"steps": trainer.state.global_step, "lengths": lengths}
    return found


class Moves(TrainerCallback):
    def __init__(self, trainer) -> None:
        self.trainer, self.moved = trainer, []
        self.before = whole_parameters(trainer)

    def on_step_end(self, args, state, control, **kwargs):
        now = whole_parameters(self.trainer)
        self.moved.append(not all(torch.equal(now[name], self.before[name]) for name in now))
        self.before = now


def run_with_nan(kind: str, data: tuple[str, str], output: Path) -> dict:
    trainer = trainer_of(kind, CASES["everything"], data, output / f"{kind} nan", max_grad_norm=1.0)
    moves = Moves(trainer)
    trainer.add_callback(moves)

    def spoil(module, args, output):
        spoils = torch.is_grad_enabled() and trainer.state.global_step == 1 and trainer.accelerator.process_index == 1
        return output * torch.nan if spoils else output

    base = trainer.accelerator.unwrap_model(trainer.model).model
    base.language_model.norm.register_forward_hook(spoil)
    trainer.train()
    left_out = [entry.get("skipped/updates", 0) for entry in trainer.state.log_history if "reward" in entry]
    return {"has_moved": moves.moved, "left_out": left_out}


if __name__ == "__main__":
    kind, data, folder = sys.argv[1], (sys.argv[2], sys.argv[3]), Path(sys.argv[4])
    engines.prepare(kind)
    for name in sys.argv[5:]:
        if name in ("generation", "nan"):
            found = (run_generation if name == "generation" else run_with_nan)(kind, data, folder)
        else:
            found = run(kind, name, data, folder)
        if os.environ.get("RANK", "0") == "0":
            case, _, checkpoint = name.partition(" from ")
            name = f"resumed {case}" if checkpoint else name
            for part in {"moved", "end"} & set(found):
                torch.save(found.pop(part), folder / f"{kind} {name} {part}.pt")
            (folder / f"{kind} {name}.json").write_text(json.dumps(found))
