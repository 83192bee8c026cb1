"""Training steps with a colocated vLLM on a CPU; writes what was logged, and what vLLM was asked, to a file.

Usage: python colocated_run.py FOLDER
"""

import functools
import json
import sys
from pathlib import Path

import plain_weights
import torch
from tiny_run import trainer_of
from trl.generation import vllm_generation
from vllm.model_executor.layers import utils as vllm_layers

from vgr_trl.trainer import DAPOTrainer

EMBEDDINGS = "embed_tokens.weight"


def run(folder: Path) -> None:
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype="float32", enforce_eager=True)
    assert vllm_layers.dispatch_cpu_unquantized_gemm is plain_weights.keep_weights
    trainer = trainer_of(folder, token_weights=True)
    calls = listen(trainer)
    trainer.train()
    (folder / "log.json").write_text(json.dumps({"steps": trainer.state.log_history[:-1], "calls": calls}))


def listen(trainer: DAPOTrainer) -> list[dict]:
    plain, calls = trainer.vllm_generation.generate, []
    first = embeddings_of_vllm(trainer).clone()

    def generate(prompts, images, num_generations, profiler):
        mine, theirs = embeddings_of(trainer.model), embeddings_of_vllm(trainer)
        far = {"behind": (mine - theirs).abs().max().item(), "since_start": (theirs - first).abs().max().item()}
        calls.append({"images": [len(row or ()) for row in images], **far})
        return plain(prompts, images, num_generations, profiler)

    trainer.vllm_generation.generate = generate
    return calls


def embeddings_of(model: torch.nn.Module) -> torch.Tensor:
    (found,) = [value for name, value in model.named_parameters() if name.endswith(EMBEDDINGS)]
    return found.detach()


def embeddings_of_vllm(trainer: DAPOTrainer) -> torch.Tensor:
    worker = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker
    embeddings = embeddings_of(worker.model_runner.model)
    return embeddings[: len(embeddings_of(trainer.model))]  # vLLM pads the vocabulary


if __name__ == "__main__":
    run(Path(sys.argv[1]))
