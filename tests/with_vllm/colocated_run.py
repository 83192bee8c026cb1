"""Training steps with a colocated vLLM on a CPU; writes what was logged, and what vLLM was asked, to a file.

Usage: python colocated_run.py FOLDER CASE
"""

import functools
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import plain_weights
import torch
from peft import LoraConfig
from tiny_run import letter_reward, options, questions, quiet_reward, saved_model
from trl.generation import vllm_generation
from vllm.model_executor.layers import utils as vllm_layers

from vgr_trl import DAPOTrainer, patches
from vgr_trl import trainer as trainer_module
from vgr_trl.batch import scoring_inputs
from vgr_trl.rewards import load_reward, vgr_reward

EMBEDDINGS = "embed_tokens.weight"


@dataclass
class Case:
    """What is trained, and how."""

    options: dict = field(default_factory=lambda: {"token_weights": True})
    rewards: tuple = (letter_reward, vgr_reward)
    lora: bool = False
    questions: int = 9


EVERYTHING = {
    "max_steps": 4,
    "token_weights": True,
    "enable_perception_filtering": True,
    "enable_entropy_filtering": True,
    "enable_trajectory_reweighting": True,
    "use_entropy_penalty": True,
    "perception_loss_weight": 0.01,
    "replay_buffer_size": 4,
    "rollout_log_steps": 1,
    "early_reward_weights": [1.0, 0.5],
    "vllm_importance_sampling_correction": True,
}
NOISY = {
    "noisy_generations": 2,
    "noisy_perturbation": "mask_image",
    "noisy_importance": "perturbed",
    "vllm_importance_sampling_correction": False,
}
BLIND = {"blind_without_tag": "completion", "vllm_max_model_length": 512}
CASES = {
    "guarded": Case(),
    "unguarded": Case(),
    "again": Case(questions=3),
    "everything": Case(EVERYTHING, (quiet_reward, vgr_reward)),
    "lora": Case(lora=True),
    "noisy": Case(NOISY, (letter_reward,)),
    "blind": Case(BLIND, (letter_reward, load_reward("blind_accuracy"))),
}


def run(folder: Path, name: str) -> None:
    torch.set_num_threads(1)
    make_vllm_exact_on_a_cpu()
    if name == "unguarded":
        patches.needs_collapsing = lambda *_: False
    case, (model, processor) = CASES[name], saved_model(folder)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    trainer = DAPOTrainer(
        str(model),
        list(case.rewards),
        options(folder, **case.options),
        questions(case.questions),
        processing_class=processor,
        peft_config=adapter if case.lora else None,
    )
    calls = listen(trainer)
    if name == "noisy":
        compare_with_scoring(calls)
    trainer.train()
    for entry in calls:
        entry.pop("logps")
    found = {"steps": trainer.state.log_history[:-1], "calls": calls}
    (folder / "log.json").write_text(json.dumps(found))


def make_vllm_exact_on_a_cpu() -> None:
    """What TRL leaves to vLLM: float32; and weights that stay where TRL puts the new ones."""
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype="float32", enforce_eager=True)
    assert vllm_layers.dispatch_cpu_unquantized_gemm is plain_weights.keep_weights


def listen(trainer: DAPOTrainer) -> list[dict]:
    """What vLLM is asked from now on: its weights then, and for prompts of text what the model says of its answers."""
    plain, calls = trainer.vllm_generation.generate, []
    first = embeddings_of_vllm(trainer).clone()

    def generate(prompts, images, num_generations, profiler):
        mine, theirs = embeddings_of(trainer.model), embeddings_of_vllm(trainer)
        answer = plain(prompts, images, num_generations, profiler)
        logps = [[values[0] for values in row] for row in answer[2]]
        entry = {
            "step": trainer.state.global_step,
            "images": images if images is None else [len(row or ()) for row in images],
            "num_generations": num_generations,
            "behind": (mine - theirs).abs().max().item(),
            "since_start": (theirs - first).abs().max().item(),
            "logps": logps,
        }
        if images is None:
            entry["difference"] = difference_from_model(trainer.model, prompts, answer[1], logps)
        calls.append(entry)
        return answer

    trainer.vllm_generation.generate = generate
    return calls


def embeddings_of(model: torch.nn.Module) -> torch.Tensor:
    (found,) = [value for name, value in model.named_parameters() if name.endswith(EMBEDDINGS)]
    return found.detach()


def embeddings_of_vllm(trainer: DAPOTrainer) -> torch.Tensor:
    worker = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker
    embeddings = embeddings_of(worker.model_runner.model)
    return embeddings[: len(embeddings_of(trainer.model))]  # vLLM pads the vocabulary


def difference_from_model(model: torch.nn.Module, prompts: list, completions: list, logps: list) -> float:
    """Largest distance of vLLM's log-probabilities from the model's, for prompts without images."""
    largest = 0.0
    with torch.no_grad():
        for prompt, completion, theirs in zip(prompts, completions, logps, strict=True):
            logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
            mine = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            largest = max(largest, (mine - torch.tensor(theirs)).abs().max().item())
    return largest


def compare_with_scoring(calls: list[dict]) -> None:
    """Note how far vLLM's log-probabilities are from those given the images of `noisy_generations`, and given clean."""
    plain = trainer_module.finish_noise

    def finish_noise(trainer, rollout):
        clean = trainer.score(scoring_inputs(rollout.batch))
        plain(trainer, rollout)
        seen, mask = rollout.batch["old_per_token_logps"], rollout.batch["completion_mask"].bool()
        theirs = torch.zeros_like(seen)
        for row, values in enumerate(calls[-1]["logps"]):
            theirs[row, : len(values)] = torch.tensor(values)
        for name, mine in (("from_seen", seen), ("from_clean", clean)):
            calls[-1][name] = ((mine - theirs).abs() * mask).amax(1).tolist()

    trainer_module.finish_noise = finish_noise


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2])
