"""Training steps with a server of vLLM on a CPU; writes what was logged to a file.

Usage: python server_run.py FOLDER URL [--die PID STEP] [--resume]     --die: kill the server while it answers
"""

import argparse
import json
import os
import signal
import threading
import time
from pathlib import Path

from safetensors.torch import save_file
from tiny_run import trainer_of
from trl.generation.vllm_client import VLLMClient

from vgr_trl.trainer import DAPOTrainer

EVERYTHING = {
    "vllm_mode": "server", "vllm_server_timeout": 5, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch",
    "token_weights": True, "replay_buffer_size": 4, "rollout_log_steps": 1, "vllm_importance_sampling_correction": True,
}  # fmt: skip


def run(folder: Path, url: str, die: tuple[int, int] | None, resume: bool) -> None:
    hand_over_weights_in_files(folder / "weights")
    trainer = trainer_of(folder, vllm_server_base_url=url, **EVERYTHING)
    if die is not None:
        kill_while_it_answers(trainer, *die)
    trainer.train(resume_from_checkpoint=resume)
    (folder / "log.json").write_text(json.dumps({"steps": trainer.state.log_history[:-1]}))


def hand_over_weights_in_files(folder: Path) -> None:
    """What TRL sends to a server through NCCL, which needs GPUs, by a file that its worker loads."""
    VLLMClient.init_communicator = lambda client, device: None

    def update(client: VLLMClient, metadata: list, named_params: object) -> None:
        folder.mkdir(exist_ok=True)
        save_file({name: value.detach().clone() for name, value in named_params}, folder / "model.safetensors")
        load = {"method": "load_file", "args": [str(folder / "model.safetensors")]}
        client._post(f"{client.base_url}/collective_rpc", json=load)

    VLLMClient.update_named_params = update


def kill_while_it_answers(trainer: DAPOTrainer, pid: int, step: int) -> None:
    """At that step the processes of the server stop, are asked for completions, and are killed before they answer."""
    plain = VLLMClient.generate

    def generate(client: VLLMClient, *args: object, **kwargs: object) -> object:
        if trainer.state.global_step == step:
            os.killpg(pid, signal.SIGSTOP)
            threading.Thread(target=lambda: (time.sleep(1), os.killpg(pid, signal.SIGKILL)), daemon=True).start()
        return plain(client, *args, **kwargs)

    VLLMClient.generate = generate


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("--die", type=int, nargs=2)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    run(given.folder, given.url, given.die, given.resume)
