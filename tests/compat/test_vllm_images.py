"""Prompts with images, as vLLM has to get them; what vLLM does with them is tested in `with_vllm/`."""

from base64 import b64decode
from io import BytesIO
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support.models.families import build
from support.models.processors import AUDIO, GEMMA, byte_tokenizer, processor
from support.old_releases import KEEPS_LESS
from support.tool_runs import TEMPLATE
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from vgr_trl.errors import ConfigError, VLLMServerError
from vgr_trl.patches import vllm as patches
from vgr_trl.patches.trl import keep_prompts_unpadded

MESSAGES = [[{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (16, 16))}]}]]


@pytest.fixture
def gemma():
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    made = processor("Gemma3Processor", images, GEMMA, byte_tokenizer, image_seq_length=4)
    made.chat_template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", made.image_token)
    return made


def test_prompts_of_gemma_4_are_not_padded():
    """Its processor pads by default, and TRL takes the padding for text."""
    absent = {"feature_extractor": None, "video_processor": None}
    made = processor("Gemma4Processor", Gemma4ImageProcessorPil(), GEMMA | AUDIO, byte_tokenizer, **absent)
    parts = {"environment_factories": None, "tools": None, "chat_template": None, "chat_template_kwargs": {}}
    trainer = SimpleNamespace(_is_vlm=True, processing_class=made, **parts)
    made.chat_template = TEMPLATE
    keep_prompts_unpadded(trainer)
    asked = [[{"role": "user", "content": text}] for text in ("a", "longer")]
    short, long = GRPOTrainer._tokenize_prompts(trainer, asked)[0]
    assert len(long) - len(short) == 5


def colocated(generate) -> SimpleNamespace:
    return SimpleNamespace(generate=generate, mode="colocate")


@pytest.mark.skipif(KEEPS_LESS, reason="Gemma 3 has another placeholder in templates")
@pytest.mark.parametrize("start", ["<|im_start|>", None])
def test_the_text_has_one_placeholder_and_the_special_tokens_of_the_processor(gemma, start):
    """A template that writes the first token itself does not get it twice."""
    gemma.tokenizer.bos_token = start
    text = gemma.tokenizer(gemma.image_token)["input_ids"]
    written = gemma.apply_chat_template(MESSAGES, tokenize=True, return_dict=True)["input_ids"][0]
    (ids,) = patches.TextProcessor(gemma).apply_chat_template(MESSAGES, tokenize=True, return_dict=True)["input_ids"]
    place = ids.index(text[0])
    assert ids.count(text[0]) == 1
    assert (ids[:place], ids[place + 1 :]) == (written[:place], written[len(written) - len(ids) + place + 1 :])


def test_later_turns_continue_the_text_of_earlier_ones(gemma):
    given = []

    def generate(prompts, *rest):
        given.extend(prompts)
        return [row], [], [], None

    vllm = colocated(generate)
    unexpanded = patches.plan_unexpanded_prompts(vllm, gemma)
    prompt, reply, tool, more = [1, 9, 9, 2], [5], [7, 9, 9, 9, 8], [6, 9]  # the policy may write a placeholder
    unexpanded.texts |= {tuple(prompt): [1, 9, 2], tuple(tool): [7, 9, 8]}
    rows = [prompt, prompt + reply + tool, prompt + reply + tool + more + tool]
    for row in rows:
        vllm.generate(prompts=[row], images=[["image"]], num_generations=1, profiler=None)
    assert given == [[1, 9, 2], [1, 9, 2, 5, 7, 9, 8], [1, 9, 2, 5, 7, 9, 8, 6, 9, 7, 9, 8]]


def test_a_prompt_that_vllm_expands_otherwise_is_refused(gemma):
    vllm = colocated(lambda prompts, *rest: (prompts, [], [], None))
    unexpanded = patches.plan_unexpanded_prompts(vllm, gemma)
    unexpanded.texts[1, 9, 9] = [1, 9]
    with pytest.raises(ConfigError):
        vllm.generate([[1, 9, 9]], [["image"]], 1)
    assert vllm.generate([[1, 9, 9]], None, 1)[0] == [[1, 9, 9]]


def test_releases_of_trl_that_do_it_themselves_give_vllm_what_they_want(gemma, monkeypatch):
    assert isinstance(patches.plan_unexpanded_prompts(colocated(None), gemma), patches.UnexpandedPrompts)
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", lambda self, prompt_ids, vllm_prompt_ids=None: None)
    assert patches.plan_unexpanded_prompts(colocated(None), gemma) is None


class Server:
    """Answers as vLLM 0.32 does: an image takes three tokens more than its placeholder; keeps what it was asked."""

    def __init__(self, status=200, **changed):
        self.asked, self.status, self.changed = [], status, changed

    def post(self, url, json):
        assert url == "http://host:8000/inference/v1/generate"
        self.asked.append(json)
        read = json["token_ids"] + [9] * 3 * len(json["content_parts"] or ())
        entry = {"token_id": 5, "logprob": -0.5, "top_logprobs": []}
        choices = [{"token_ids": [5], "logprobs": {"content": [entry]}}] * json["sampling_params"]["n"]
        answer = {"choices": choices, "prompt_token_ids": read, **self.changed}
        return SimpleNamespace(status_code=self.status, json=lambda: answer, text="At most 1\nimage")


def served(processor, server) -> VLLMGeneration:
    """TRL's generation by its own client of a server."""
    client, vllm = VLLMClient.__new__(VLLMClient), VLLMGeneration.__new__(VLLMGeneration)
    client.__dict__ |= {"base_url": "http://host:8000", "model": "tiny", "session": server}
    sampling = dict.fromkeys(("temperature", "top_p", "repetition_penalty"), 1.0) | {"top_k": 0, "min_p": None}
    sampling |= {"max_completion_length": 8, "logprobs": 0, "structured_outputs_regex": None, "generation_kwargs": {}}
    accelerator = SimpleNamespace(is_main_process=True, process_index=0)
    vllm.__dict__ |= {"mode": "server", "vllm_client": client, "accelerator": accelerator, **sampling}
    patches.plan_unexpanded_prompts(vllm, processor).texts[1, 9, 9, 9, 9] = [1, 9]
    return vllm


def test_a_server_gets_images_beside_unexpanded_prompts(gemma):
    """Once for a group, as the processor reads transparency; rows without images too."""
    vllm, image = served(gemma, server := Server()), Image.new("RGBA", (16, 16), (200, 30, 30, 99))
    rows = [[1, 9, 9, 9, 9]] * 2 + [[1, 2]] * 2
    with patches.answers_of_server(vllm, 1):
        read, completions, logps, _ = vllm.generate(rows, [[image]] * 2 + [None] * 2, 2)
    assert (read, completions, logps) == ([[1, 9, 9, 9, 9]] * 2 + [[1, 2]] * 2, [[5]] * 4, [[[-0.5]]] * 4)
    server.asked.sort(key=lambda asked: asked["token_ids"])  # they were asked at a time
    assert [asked["token_ids"] for asked in server.asked] == [[1, 2], [1, 9]]
    none, (part,) = (asked["content_parts"] for asked in server.asked)
    sent = Image.open(BytesIO(b64decode(part["url"].partition("base64,")[2])))
    assert (none, part["type"], sent.mode) == (None, "image_url", "RGB")
    assert torch.equal(*gemma.image_processor([image, sent], return_tensors="pt")["pixel_values"])


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"status": 404}, VLLMServerError, "from 0.30 on"),
        ({"prompt_token_ids": None}, VLLMServerError, "from 0.30 on"),
        ({"status": 400}, VLLMServerError, "At most 1 image"),
        ({"choices": []}, VLLMServerError, "completions a prompt"),
        ({"prompt_token_ids": [1, 9, 9, 9]}, ConfigError, "vLLM reads a prompt with images as 4 tokens"),
    ],
)
def test_what_a_server_that_answers_otherwise_leads_to(gemma, given, error, words):
    vllm = served(gemma, Server(**given))
    with pytest.raises(error, match=words), patches.answers_of_server(vllm, 1):
        vllm.generate([[1, 9, 9, 9, 9]], [[MESSAGES[0][0]["content"][0]["image"]]], 1)


def test_weights_have_the_names_of_a_checkpoint(tmp_path):
    build("llava").save_pretrained(tmp_path)
    saved, model = load_file(tmp_path / "model.safetensors"), build("llava")
    vllm = SimpleNamespace(_iter_named_params=model.named_parameters)
    patches.name_weights_as_saved(vllm, model)
    sent = dict(vllm._iter_named_params())
    assert sent.keys() == saved.keys() != dict(model.named_parameters()).keys()
    assert all(torch.equal(sent[name], saved[name]) for name in saved)


def test_a_model_that_vllm_does_not_serve_is_named():
    with pytest.raises(ConfigError, match="Ovis2ForCausalLM"), patches.naming_unserved_model():
        raise ValueError(
            "Value error, Model architectures ['Ovis2ForCausalLM'] are not supported for now. Supported: []"
        )
    with pytest.raises(ValueError, match="another"), patches.naming_unserved_model():
        raise ValueError("another")
