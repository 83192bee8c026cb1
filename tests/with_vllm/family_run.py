"""Steps of one family with vLLM on a CPU, and what vLLM's log-probabilities differ by from the trainer's.

Usage: python family_run.py FOLDER FAMILY [--tools] [--server] [--larger]     writes FOLDER/log.json

--tools: they return images     --server: it starts one; else vLLM is colocated
--larger: in the end the trainer's processor enlarges images, and vLLM's does not
"""

import functools
import json
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import plain_weights
import torch
import transformers as hf
from datasets import Dataset
from PIL import Image, ImageDraw
from running import served
from safetensors.torch import load_file, save_file
from server_run import hand_over_weights_in_files
from support.models.families import FAMILIES, OTHERS, PINPOINTS, Family, build
from support.models.processors import FOUR_TOKENS, byte_tokenizer
from support.tool_runs import TEMPLATE, look
from trl.chat_template_utils import qwen3_template
from trl.generation import vllm_generation
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

LINES = {f"line_ends_{count}": "\n" * count for count in (1, 2, 3, 4)}  # vLLM looks for these tokens of Gemma 3
SIZE = {"height": 16, "width": 16}
TRIPLE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN = {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>", "image_token": "<|image_pad|>"}
QWEN |= {"video_token": "<|video_pad|>"}
QWEN_CONFIG = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
QWEN_CONFIG |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
PIXELS = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
BOUNDS = {"size": {"shortest_edge": 64, "longest_edge": 512}}
IDEFICS = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}
IDEFICS |= {"image_boundary_token": "<fake_token_around_image>", "global_image_token": "<global-img>"}
IDEFICS |= {"end_of_utterance_token": "<end_of_utterance>", "end_token": "<end_of_utterance>"}
IDEFICS |= {f"r{r}c{c}": f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2)} | {"video_token": "<video>"}
TILES = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
LLAVA = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
SHORT = {"size": {"shortest_edge": 16}, "crop_size": SIZE}


def _qwen(kind: str, images: Any = None, videos: str = "Qwen2VLVideoProcessor") -> Callable[[], Any]:
    def made() -> Any:
        given = images or hf.Qwen2VLImageProcessor(**PIXELS, **BOUNDS)
        return getattr(hf, kind)(given, byte_tokenizer(**QWEN), getattr(hf, videos)(**PIXELS))

    return made


def _glm() -> Any:
    special = {
        "a": "<|begin_of_image|>",
        "b": "<|end_of_image|>",
        "image_token": "<|image|>",
        "video_token": "<|video|>",
    }
    special |= {"c": "<|begin_of_video|>", "d": "<|end_of_video|>"}
    images = hf.Glm4vImageProcessor(**PIXELS, **BOUNDS)
    return hf.Glm4vProcessor(images, byte_tokenizer(**special), hf.Glm4vVideoProcessor(**PIXELS))


def _gemma3() -> Any:
    special = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    return hf.Gemma3Processor(hf.Gemma3ImageProcessor(size=SIZE), byte_tokenizer(**special, **LINES), **FOUR_TOKENS)


def _gemma4() -> Any:
    special = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>"}
    special |= {"boa_token": "<|audio>", "eoa_token": "<audio|>", "video_token": "<|video|>"}
    images = hf.Gemma4ImageProcessor(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    videos = hf.Gemma4VideoProcessor(patch_size=4, pooling_kernel_size=2)
    return hf.Gemma4Processor(hf.Gemma4AudioFeatureExtractor(), images, byte_tokenizer(**special), videos)


def _llava() -> Any:
    return hf.LlavaProcessor(hf.CLIPImageProcessor(**SHORT), byte_tokenizer(image_token="<image>"), **LLAVA)


def _llava_next() -> Any:
    images = hf.LlavaNextImageProcessor(**SHORT, image_grid_pinpoints=PINPOINTS)
    return hf.LlavaNextProcessor(images, byte_tokenizer(image_token="<image>"), **LLAVA)


def _internvl() -> Any:
    special = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    images = hf.GotOcr2ImageProcessor(size=SIZE, crop_to_patches=True, max_patches=4)
    tokenizer = byte_tokenizer(**special, video_token="<video>")
    return hf.InternVLProcessor(images, tokenizer, hf.InternVLVideoProcessor(size=SIZE), **FOUR_TOKENS)


def _idefics2() -> Any:
    images = hf.Idefics2ImageProcessor(size={"shortest_edge": 16, "longest_edge": 16}, do_image_splitting=False)
    return hf.Idefics2Processor(images, byte_tokenizer(**IDEFICS), image_seq_len=4)


def _idefics3() -> Any:
    return hf.Idefics3Processor(hf.Idefics3ImageProcessor(**TILES), byte_tokenizer(**IDEFICS), image_seq_len=4)


def _smolvlm() -> Any:
    videos = hf.SmolVLMVideoProcessor(
        **TILES, video_sampling={"fps": 1, "max_frames": 4, "video_size": {"longest_edge": 16}}
    )
    images = hf.SmolVLMImageProcessor(**TILES)
    return hf.SmolVLMProcessor(images, byte_tokenizer(**IDEFICS), videos, image_seq_len=4)


def _mistral3() -> Any:
    special = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    images = hf.PixtralImageProcessor(size={"longest_edge": 32}, patch_size=4)
    return hf.PixtralProcessor(images, byte_tokenizer(**special), patch_size=4, spatial_merge_size=2)


def _paligemma() -> Any:
    images = hf.SiglipImageProcessor(size=SIZE)
    images.image_seq_length = 16
    tokenizer = byte_tokenizer(image_token="<image>", bos_token="<bos>", **LINES)
    tokenizer.bos_token = "<bos>"
    return hf.PaliGemmaProcessor(images, tokenizer)


def _ovis2() -> Any:
    special = {"image_token": "<image>", "a": "<IMG_START>", "b": "<IMG_ATOM>", "c": "<IMG_GRID>", "d": "<IMG_COL>"}
    special |= {"e": "<IMG_ROW>", "f": "<IMG_END>"}
    images = hf.Ovis2ImageProcessor(size=SIZE, crop_to_patches=False)
    return hf.Ovis2Processor(images, byte_tokenizer(**special), image_seq_length=4)


def _lfm2() -> Any:
    special = {"image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"}
    special |= {"image_thumbnail": "<|img_thumbnail|>"}
    images = hf.Lfm2VlImageProcessor(
        do_image_splitting=False, encoder_patch_size=4, downsample_factor=2, tile_size=16, min_image_tokens=2,
        max_image_tokens=4, max_num_patches=16,
    )  # fmt: skip
    return hf.Lfm2VlProcessor(images, byte_tokenizer(**special))


# family -> processor, image of the template, tokens of the configuration, and what else differs from `families.yaml`
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
HEADS = {"rope_parameters": MROPE}
INTERLEAVED = {"rope_parameters": {**MROPE, "mrope_interleaved": True}}
GLM_ROPE = {"rope_parameters": {**MROPE, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}}
GLM_ROPE |= {"attention_bias": True}
EXPERTS = {**INTERLEAVED, "norm_topk_prob": True}
QWEN3_5 = {"rope_parameters": {**MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}}
QWEN3_5["rope_parameters"]["partial_rotary_factor"] = 0.5
QWEN3_5 |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}  # vLLM on a CPU takes channels by 32
OUT = {"out_hidden_size": 64}
INDEX = {"image_token_index": "<image>"}
GEMMA3 = {
    "image_token_index": "<image_soft_token>",
    "boi_token_index": "<start_of_image>",
    "eoi_token_index": "<end_of_image>",
}
GEMMA4 = {
    "image_token_id": "<|image|>",
    "boi_token_id": "<|image>",
    "eoi_token_id": "<image|>",
    "video_token_id": "<|video|>",
}
GEMMA4_LAYERS = {"global_head_dim": 32, "vocab_size_per_layer_input": 275}
GEMMA4_VISION = {"default_output_length": 70}
GLM = {"image_token_id": "<|image|>", "video_token_id": "<|video|>", "image_start_token_id": "<|begin_of_image|>"}
GLM |= {"image_end_token_id": "<|end_of_image|>", "video_start_token_id": "<|begin_of_video|>"}
GLM |= {"video_end_token_id": "<|end_of_video|>"}
SETUPS: dict[str, tuple[Callable[[], Any], str, dict[str, str], dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (_qwen("Qwen2VLProcessor"), TRIPLE, QWEN_CONFIG, HEADS, {"hidden_size": 64}),
    "qwen2_5_vl": (_qwen("Qwen2_5_VLProcessor"), TRIPLE, QWEN_CONFIG, HEADS, OUT),
    "qwen3_vl": (_qwen("Qwen3VLProcessor", videos="Qwen3VLVideoProcessor"), TRIPLE, QWEN_CONFIG, INTERLEAVED, OUT),
    "qwen3_vl_moe": (_qwen("Qwen3VLProcessor", videos="Qwen3VLVideoProcessor"), TRIPLE, QWEN_CONFIG, EXPERTS, OUT),
    "qwen3_5": (_qwen("Qwen3VLProcessor", videos="Qwen3VLVideoProcessor"), TRIPLE, QWEN_CONFIG, QWEN3_5, OUT),
    "glm4v": (_glm, "<|begin_of_image|><|image|><|end_of_image|>", GLM, GLM_ROPE, OUT),
    "gemma3": (_gemma3, "<start_of_image>", GEMMA3, {}, {}),
    "gemma4": (_gemma4, "<|image|>", GEMMA4, {"global_head_dim": 32}, GEMMA4_VISION),
    "gemma4_published": (_gemma4, "<|image|>", GEMMA4, GEMMA4_LAYERS, GEMMA4_VISION),
    "llava": (_llava, "<image>", INDEX, {}, {}),
    "llava_next": (_llava_next, "<image>", INDEX, {}, {}),
    "internvl": (_internvl, "<IMG_CONTEXT>", {"image_token_id": "<IMG_CONTEXT>"}, {}, {}),
    "idefics2": (_idefics2, "<image>", {"image_token_id": "<image>"}, {}, {}),
    "idefics3": (_idefics3, "<image>", {"image_token_id": "<image>"}, {}, {}),
    "smolvlm": (_smolvlm, "<image>", {"image_token_id": "<image>"}, {}, {}),
    "mistral3": (_mistral3, "[IMG]", {"image_token_index": "[IMG]"}, {}, {}),
    "paligemma": (_paligemma, "", INDEX, {}, {"projection_dim": 64}),
    "ovis2": (_ovis2, "<image>", {"image_token_id": "<IMG_ATOM>"}, {}, {}),
    "lfm2_vl": (
        _lfm2,
        "<image>",
        {"image_token_id": "<image>"},
        {"conv_dim": 64, "block_dim": 64, "block_ff_dim": 96},
        {"vision_use_head": False},
    ),
}


def saved_model(name: str, folder: Path) -> Any:
    """Save a tiny model of a family, with heads of 32, and its processor; return the processor as it is loaded."""
    make_processor, image, tokens, text, vision = SETUPS[name]
    processor = make_processor()
    processor.chat_template = processor.tokenizer.chat_template = TEMPLATE.replace(TRIPLE, image)
    processor.tokenizer.padding_side = "left"
    number = processor.tokenizer.convert_tokens_to_ids
    family = {**FAMILIES, **OTHERS}[name]
    smaller = family.build()
    config = smaller.config
    for key, token in tokens.items():
        setattr(config, key, number(token))
    sizes = {"vocab_size": len(processor.tokenizer), "hidden_size": 64, "head_dim": 32, "intermediate_size": 96}
    sizes |= {"max_position_embeddings": 2048, "eos_token_id": number("<|im_end|>"), "pad_token_id": number("<pad>")}
    for key, value in {**sizes, **text}.items():
        setattr(config.text_config, key, value)
    for key, value in vision.items():
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
    """Whether vLLM has read the same tokens as the trainer, for each row of each turn from now on."""
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


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def refusal(trainer: DAPOTrainer) -> str:
    """How prompts of Qwen end whose images take more tokens in the trainer than in vLLM."""
    trainer.processing_class.image_processor.size = {"shortest_edge": 1024, "longest_edge": 4096}
    try:
        trainer.evaluate(questions({"one": (1, 1)}))
    except ConfigError as error:
        return str(error)
    return ""


def run(folder: Path, name: str, tools: bool, server: bool, larger: bool) -> None:
    torch.set_num_threads(1)
    dtype = DTYPES.get(name, "float32")
    processor, planned = saved_model(name, folder / "model"), STEPS_OF.get(name, STEPS)
    if tools:
        call_tools()
        processor.tokenizer.response_template = qwen3_template
    args = {
        "use_vllm": True, "vllm_max_model_length": 1024, "num_generations": GROUP,
        "per_device_train_batch_size": 2 * GROUP, "max_completion_length": 600, "generation_kwargs": {"max_tokens": 8},
        "max_steps": len(planned), "learning_rate": 1e-3,
        "shuffle_dataset": False, "model_init_kwargs": {"dtype": dtype}, "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "logging_steps": 1, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True,
    }  # fmt: skip
    given = {"processing_class": processor, "tools": [look] if tools else None}
    if server:
        hand_over_weights_in_files(folder / "weights")
        serving = served(folder / "model", folder / "server.log", free_port(), length=1024, dtype=dtype)
    else:
        vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype=dtype, enforce_eager=True)
        assert vllm_layers.dispatch_cpu_unquantized_gemm is plain_weights.keep_weights
        serving = nullcontext((None, None))
    with serving as (url, _):
        mode = {"vllm_mode": "server", "vllm_server_base_url": url} if server else {"vllm_mode": "colocate"}
        options = DAPOConfig(str(folder), **args, **mode)
        trainer = DAPOTrainer(str(folder / "model"), reward, options, questions(planned), **given)
        reads = listen(trainer)
        trainer.train()
        log = trainer.state.log_history[:-1]
        refused = refusal(trainer) if larger else None
    steps = dict(zip(planned, log, strict=True))
    differences = {kind: step["sampling/sampling_logp_difference/max"] for kind, step in steps.items()}
    entropies = {kind: step["entropy"] for kind, step in steps.items()}
    pixels = [step["pixels/engine_distance"] for step in steps.values() if "pixels/engine_distance" in step]
    found = {"differences": differences, "entropies": entropies, "same_tokens": all(reads), "rows": len(reads)}
    found |= {"checked": pixels, "refused": refused}
    (folder / "log.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], "--tools" in sys.argv, "--server" in sys.argv, "--larger" in sys.argv)
