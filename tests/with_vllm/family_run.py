"""Steps of one family with vLLM on a CPU, and what vLLM's log-probabilities differ by from the trainer's.

Usage: python family_run.py FOLDER FAMILY [--tools] [--server] [--larger] [--dies] [--resumes]

It writes FOLDER/log.json.
--tools: they return images     --server: it starts one; else vLLM is colocated
--larger: in the end the trainer's processor enlarges images, and vLLM's does not
--dies: the server is killed while it answers in the last step     --resumes: the run is continued
"""

import functools
import json
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import plain_weights
import torch
import transformers as hf
import yaml
from datasets import Dataset
from PIL import Image, ImageDraw
from running import served
from safetensors.torch import load_file, save_file
from support.models.families import FAMILIES, OTHERS, Family, build
from support.models.processors import byte_tokenizer
from support.tool_runs import TEMPLATE, look
from trl.chat_template_utils import qwen3_template
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.trainer import grpo_trainer
from vllm.model_executor.layers import utils as vllm_layers

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.errors import ConfigError
from vgr_trl.trainer import DAPOTrainer

GROUP = 4  # completions of a prompt
STEPS = {"one": (1, 1), "several": (2, 3), "none": (0, 0), "mixed": (0, 2)}  # images of the two prompts of each step
STEPS_OF = {
    "mistral3": {"one": (1, 1), "several": (2, 2), "none": (0, 0)},  # its processor takes prompts of one length alone
    "paligemma": {"one": (1, 1)},  # its processor wants images, and vLLM takes one
}
DTYPES = {"qwen3_5": "bfloat16"}  # vLLM's gated delta net on a CPU takes no other
KEPT = {"save_strategy": "steps", "save_steps": 1, "replay_buffer_size": 4}

TABLE = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text(encoding="utf-8"))
TRIPLE = "<|vision_start|><|image_pad|><|vision_end|>"


def made_processor(tokenizer: Any, kind: str, parts: dict[str, dict[str, Any]], **options: Any) -> Any:
    """A processor with its parts, each of a class with options; `options`: those of the processor itself."""
    made = {name: getattr(hf, part["kind"])(**part.get("options", {})) for name, part in parts.items()}
    if kind == "PaliGemmaProcessor":
        made["image_processor"].image_seq_length, tokenizer.bos_token = 16, "<bos>"
    return getattr(hf, kind)(tokenizer=tokenizer, **made, **options)


def saved_model(name: str, folder: Path) -> Any:
    """Save a tiny model of a family, with heads of 32, and its processor; return the processor as it is loaded."""
    row = TABLE[name]
    processor = made_processor(byte_tokenizer(**row["special"]), **row["processor"])
    processor.chat_template = processor.tokenizer.chat_template = TEMPLATE.replace(TRIPLE, row["image"])
    processor.tokenizer.padding_side = "left"
    number = processor.tokenizer.convert_tokens_to_ids
    family = {**FAMILIES, **OTHERS}[name]
    smaller = family.build()
    config = smaller.config
    for key, token in row["tokens"].items():
        setattr(config, key, number(token))
    sizes = {"vocab_size": len(processor.tokenizer), "hidden_size": 64, "head_dim": 32, "intermediate_size": 96}
    sizes |= {"max_position_embeddings": 2048, "eos_token_id": number("<|im_end|>"), "pad_token_id": number("<pad>")}
    for key, value in {**sizes, **row.get("text", {})}.items():
        setattr(config.text_config, key, value)
    for key, value in row.get("vision", {}).items():
        setattr(config.vision_config, key, value)
    if name == "paligemma":
        config.projection_dim = config.hidden_size = 64
    if name == "ovis2":
        config.vocab_size, config.hidden_size = len(processor.tokenizer), 64
        config.visual_indicator_token_ids = [number(f"<IMG_{part}>") for part in ("START", "GRID")]
    if name == "idefics2":
        config.perceiver_config.hidden_size = 64
    torch.manual_seed(0)
    model = build(Family(name, lambda: type(smaller)(type(config).from_dict(config.to_dict()))))
    model.generation_config.eos_token_id = number("<|im_end|>")
    special = [token for token in processor.tokenizer.all_special_tokens if token.strip() not in ("", "<|im_end|>")]
    never_say(model, [number(token) for token in special])
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    published = dict(as_published(name, *each) for each in load_file(file).items())
    save_file(published, file, metadata={"format": "pt"})
    processor.save_pretrained(folder)
    return hf.AutoProcessor.from_pretrained(folder, padding_side="left")


def as_published(name: str, key: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    """A weight as published checkpoints name it: vLLM reads no others, and transformers keeps what it has loaded."""
    if name in ("gemma3", "llava", "llava_next", "paligemma", "lfm2_vl"):
        key = key.replace("vision_tower.", "vision_tower.vision_model.")
    return key, weight


def never_say(model: torch.nn.Module, tokens: list[int]) -> None:
    """Make special tokens too unlikely to be drawn: the first coordinate is large in every state behind a word."""
    embeddings, head = (part.weight.data for part in (model.get_input_embeddings(), model.get_output_embeddings()))
    is_tied = embeddings.data_ptr() == head.data_ptr()
    embeddings *= 0.1 if is_tied else 1.0
    embeddings[:, 0] = 5.0
    head[:, 0] = 5.0 if is_tied else 0.0
    head[tokens, 0] = -5.0 if is_tied else -30.0


def picture(row: int, place: int) -> Image.Image:
    wide = 16 + 16 * (place % 2)
    image = Image.new("RGB", (wide, 16), (row * 40 % 256, 90, 200))
    ImageDraw.Draw(image).line((0, 0, wide, 16), (255, 60 * (row + place) % 256, 0), 5)
    return image


def questions(steps: dict[str, tuple[int, int]]) -> Dataset:
    rows = []
    for counts in steps.values():
        for count in counts:
            images = [picture(len(rows), place) for place in range(count)]
            content = [{"type": "image"} for _ in images] + [{"type": "text", "text": f"what is number {len(rows)}?"}]
            rows.append({"images": images, "prompt": [{"role": "user", "content": content}]})
    return Dataset.from_list(rows)


def reward(completions: list, **kwargs: object) -> list[float]:
    return [float(len(completion[0]["content"]) % 5) for completion in completions]


def listen(trainer: DAPOTrainer) -> list[bool]:
    plain, same = trainer.vllm_generation.generate, []

    def generate(prompts, images, num_generations, profiler):
        read, *rest = plain(prompts, images, num_generations, profiler)
        same.extend(list(ids) == list(seen) for ids, seen in zip(prompts, read, strict=True))
        return read, *rest

    trainer.vllm_generation.generate = generate
    return same


def call_tools() -> None:
    """Let completions of a prompt, whatever was sampled, call a tool never, once, twice and once."""
    plain, seen = grpo_trainer.parse_response, {0: 0, 1: 0, 2: 0}
    asks = {0: lambda row: row % GROUP > 0, 1: lambda row: row % 3 == 1, 2: lambda row: False}

    def parse(tokenizer: Any, ids: list[int], prefix: list[int], **options: Any) -> dict[str, Any]:
        turn = tokenizer.decode(prefix).count("<|im_start|>tool")
        row, seen[turn] = seen[turn], seen[turn] + 1
        call = {"type": "function", "function": {"name": "look", "arguments": {"wide": 56 * (turn + 1)}}}
        return plain(tokenizer, ids, prefix=prefix, **options) | ({"tool_calls": [call]} if asks[turn](row) else {})

    grpo_trainer.parse_response = parse


def hand_over_weights_in_files(folder: Path) -> None:
    """What TRL sends to a server through NCCL, which needs GPUs, by a file that its worker loads."""
    VLLMClient.init_communicator = lambda client, device: None

    def update(client: VLLMClient, metadata: list, named_params: object) -> None:
        folder.mkdir(exist_ok=True)
        save_file({name: value.detach().clone() for name, value in named_params}, folder / "model.safetensors")
        load = {"method": "load_file", "args": [str(folder / "model.safetensors")]}
        client._post(f"{client.base_url}/collective_rpc", json=load)

    VLLMClient.update_named_params = update


def kill_while_it_answers(trainer: DAPOTrainer, pid: int) -> None:
    """In the last step the server stops, is asked for completions, and is killed before it answers."""
    plain = VLLMClient.generate

    def generate(client: VLLMClient, *args: object, **kwargs: object) -> object:
        if trainer.state.global_step == trainer.state.max_steps - 1:
            os.killpg(pid, signal.SIGSTOP)
            threading.Thread(target=lambda: (time.sleep(1), os.killpg(pid, signal.SIGKILL)), daemon=True).start()
        return plain(client, *args, **kwargs)

    VLLMClient.generate = generate


def refusal(trainer: DAPOTrainer) -> str:
    """How prompts of Qwen end whose images take more tokens in the trainer than in vLLM."""
    trainer.processing_class.image_processor.size = {"shortest_edge": 1024, "longest_edge": 4096}
    try:
        trainer.evaluate(questions({"one": (1, 1)}))
    except ConfigError as error:
        return str(error)
    return ""


def run(folder: Path, name: str, flags: set[str]) -> None:
    torch.set_num_threads(1)
    dtype = DTYPES.get(name, "float32")
    processor, planned = saved_model(name, folder / "model"), STEPS_OF.get(name, STEPS)
    server = "--server" in flags
    if "--tools" in flags:
        call_tools()
        processor.tokenizer.response_template = qwen3_template
    args = {
        "use_vllm": True, "vllm_max_model_length": 1024, "num_generations": GROUP,
        "per_device_train_batch_size": 2 * GROUP, "max_completion_length": 600, "generation_kwargs": {"max_tokens": 8},
        "max_steps": len(planned), "learning_rate": 1e-3, "shuffle_dataset": False, "vllm_server_timeout": 5,
        "model_init_kwargs": {"dtype": dtype}, "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "logging_steps": 1, "report_to": "none", "disable_tqdm": True,
        "rollout_log_steps": 1, **(KEPT if flags & {"--dies", "--resumes"} else {"save_strategy": "no"}),
    }  # fmt: skip
    given = {"processing_class": processor, "tools": [look] if "--tools" in flags else None}
    if server:
        hand_over_weights_in_files(folder / "weights")
        serving = served(folder / "model", folder / "server.log", dtype)
    else:
        vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype=dtype, enforce_eager=True)
        assert vllm_layers.dispatch_cpu_unquantized_gemm is plain_weights.keep_weights
        serving = nullcontext((None, None))
    with serving as (url, pid):
        mode = {"vllm_mode": "server", "vllm_server_base_url": url} if server else {"vllm_mode": "colocate"}
        options = DAPOConfig(str(folder), **args, **mode)
        trainer = DAPOTrainer(str(folder / "model"), reward, options, questions(planned), **given)
        reads = listen(trainer)
        if "--dies" in flags:
            kill_while_it_answers(trainer, pid)
        trainer.train(resume_from_checkpoint="--resumes" in flags)
        log = trainer.state.log_history[:-1]
        refused = refusal(trainer) if "--larger" in flags else None
    steps = dict(zip(planned, log, strict=True))
    differences = {kind: step["sampling/sampling_logp_difference/max"] for kind, step in steps.items()}
    pixels = [step["engine/distance"] for step in steps.values() if "engine/distance" in step]
    found = {"differences": differences, "same_tokens": all(reads), "rows": len(reads)}
    found |= {"checked": pixels, "refused": refused, "gradients": [step["grad_norm"] for step in log]}
    (folder / "log.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], {*sys.argv[3:]})
