"""Tiny random models and questions, made here, so that no test downloads anything."""

import gc
import os

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from accelerate.state import GradientState
from datasets import Dataset, Features, List, Value, disable_progress_bars
from datasets import Image as ImageFeature
from PIL import Image
from support.launching import held_port
from support.models.tiny_questions import image_rows, vision  # noqa: F401
from support.old_releases import replace_missing_products
from support.trl_head import replace_missing_head
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from vgr_trl.demo.tiny_model import build_tiny_vlm

torch.set_num_threads(1)
disable_progress_bars()
replace_missing_head()
replace_missing_products()
if find_spec("hypothesis"):  # not on a machine with a GPU that takes no packages
    from hypothesis import HealthCheck, settings

    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")

WORDS = tuple(dict.fromkeys("what colour is the shape red blue green teal A B C D . : ? system user assistant".split()))
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
COLUMNS = dict.fromkeys("id source family image problem choices solution thought".split(), Value("string"))
FEATURES = Features(COLUMNS | {"image": ImageFeature(), "choices": List(Value("string"))})


@pytest.fixture(scope="session", autouse=True)
def imported_modules_are_no_garbage():
    """A trainer collects garbage when it starts; looking through all that is imported is half of a tiny training."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def alone():
    """A test rounds as if it ran alone, and a training that stopped within an optimizer step promises it nothing."""
    torch.set_num_threads(1)
    GradientState()._set_sync_gradients(True)


@pytest.fixture(scope="session")
def text_tokenizer() -> PreTrainedTokenizerFast:
    specials = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {word: index for index, word in enumerate([*specials, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<|im_end|>"}
    more = {"additional_special_tokens": ["<|im_start|>"], "chat_template": CHAT, "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **more)


@pytest.fixture
def text_model(text_tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    ids = {"pad_token_id": text_tokenizer.pad_token_id, "eos_token_id": text_tokenizer.eos_token_id}
    config = Qwen2Config(**sizes, **heads, **ids, vocab_size=len(text_tokenizer), bos_token_id=None)
    return Qwen2ForCausalLM(config)


@pytest.fixture
def text_rows() -> Dataset:
    colours = ["red", "blue", "green", "teal"]
    prompts = [[{"role": "user", "content": f"what colour is the shape ? {colours[i % 4]}"}] for i in range(12)]
    return Dataset.from_dict({"prompt": prompts, "solution": [colours[i % 4] for i in range(12)]})


@pytest.fixture
def text_trainer(text_model: Qwen2ForCausalLM, text_tokenizer: PreTrainedTokenizerFast, text_rows: Dataset, tmp_path):
    """Builds trainers of the tiny text model, of this library or, with `classes=STOCK`, of TRL; options by name."""
    from support import trainers  # takes seconds, which tests of pure functions need not wait for

    def build(rewards=trainers.letters_reward, rows=text_rows, eval_rows=None, *, model=text_model,
              classes=trainers.OURS, peft_config=None, **changed):  # fmt: skip
        trainer, kind = classes
        options = trainers.config(changed.pop("output_dir", tmp_path / "run"), kind, **changed)
        more = {"processing_class": text_tokenizer, "peft_config": peft_config}
        return trainer(model, rewards, options, rows, eval_rows, **more)

    return build


@pytest.fixture
def passes(monkeypatch):
    """Passes over completions: whether with gradients, and how many rows run."""
    from vgr_trl.passes import run_pass  # takes seconds, too

    seen, compute = [], run_pass._compute

    def counted(*args):
        computed = compute(*args)
        seen.append((torch.is_grad_enabled(), computed.rows_run))
        return computed

    monkeypatch.setattr(run_pass, "_compute", counted)
    return seen


@pytest.fixture
def port():
    """One that nobody else is given."""
    with held_port() as number:
        yield number


@pytest.fixture
def png(tmp_path: Path) -> Path:
    path = tmp_path / "image.png"
    Image.new("RGB", (8, 8), (255, 0, 0)).save(path)
    return path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vgr_trl.demo.demo import FAMILIES  # needs TRL, which tests of signals and sharing do not

    folder = tmp_path_factory.mktemp("model")
    texts = [problem for problem, _ in FAMILIES.values()] + [word for _, words in FAMILIES.values() for word in words]
    model, processor = build_tiny_vlm([*texts, "A. B. C. D."], hidden_size=32, num_layers=3, vision_depth=1)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def question_files(tmp_path_factory: pytest.TempPathFactory) -> str:
    from vgr_trl.demo.demo import draw_questions

    folder = tmp_path_factory.mktemp("questions")
    for split, count in (("train", 16), ("test", 6)):
        rows = draw_questions(count, seed=0, split=split)
        Dataset.from_list(rows, features=FEATURES).to_parquet(folder / f"{split}.parquet")
    return f"train={folder}/train.parquet,test={folder}/test.parquet"


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> list:
    """Devices whose random state is read; reading it on a GPU initialises that GPU. None of the eight can be used."""
    read: list = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # torch built with CUDA counts them to answer
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", read.append)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    return read


@pytest.fixture
def vision_trainer(model_folder: Path, question_files: str, tmp_path: Path):
    """Builds trainers of the tiny vision-language model; options, defaults of a file among them, are given by name."""
    from support import trainers  # takes seconds, which tests of pure functions need not wait for

    rows = trainers.prompts(trainers.train_file(question_files))

    def build(
        rewards=trainers.letters_reward, rows=rows, eval_rows=None, *, model=None, rollout_func=None,
        peft_config=None, **changed
    ):  # fmt: skip
        options = trainers.config(changed.pop("output_dir", tmp_path / "run"), **changed)
        more = {"model": model, "rollout_func": rollout_func, "peft_config": peft_config}
        return trainers.vision_trainer(model_folder, rewards, options, rows, eval_rows, **more)

    build.rows = rows
    return build
