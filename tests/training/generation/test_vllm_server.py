from types import SimpleNamespace

import pytest
from requests.exceptions import ConnectionError as NoAnswer
from support.vllm import Sampler
from trl.generation import vllm_client
from trl.trainer import grpo_trainer

from vgr_trl.errors import VLLMServerError
from vgr_trl.patches.vllm import answers_of_server, check_answer
from vgr_trl.rewards import accuracy_reward


class Speaker(Sampler):
    """Its server answers with `status`, and dies in its second rollout if it is to."""

    dies, status = False, 200

    def __init__(self, accelerator, mode, **given):
        super().__init__([], (3, 4), False, **given)
        self.accelerator, self.mode = accelerator, mode
        self.vllm_client = SimpleNamespace(base_url="http://host:8000", session=SimpleNamespace(post=self.post))

    def post(self, url):
        self.done.append(url)
        return SimpleNamespace(status_code=self.status)

    def generate(self, *asked):
        if self.dies and "generate" in self.done:
            raise NoAnswer("Max retries exceeded\nwith url: /inference/v1/generate")
        self.done.append("generate")
        return super().generate(*asked)


@pytest.fixture
def run(vision_trainer, monkeypatch):
    def make(mode, **said):
        monkeypatch.setattr(grpo_trainer, "VLLMGeneration", type("Said", (Speaker,), said))
        options = {"use_vllm": True, "vllm_mode": mode, "vllm_importance_sampling_correction": False}
        return vision_trainer([accuracy_reward], max_steps=2, **options)

    return make


@pytest.mark.parametrize(
    ("mode", "forgets"), [("colocate", "forget"), ("server", "http://host:8000/reset_encoder_cache")]
)
def test_images_are_forgotten_with_every_new_weights(run, mode, forgets):
    trainer = run(mode)
    trainer.train()
    assert trainer.vllm_generation.done == ["sync", forgets, "generate"] * 2
    if mode == "server":
        with pytest.raises(VLLMServerError):
            run(mode, status=404).train()


def test_a_server_that_dies_is_named(run):
    trainer = run("server", dies=True)
    with pytest.raises(
        VLLMServerError, match=r"at http://host:8000 did not answer in step 2 \(Max retries exceeded with"
    ):
        trainer.train()
    assert trainer.state.global_step == 1


def test_log_probabilities_are_read_in_both_forms():
    """As servers of vLLM 0.31 and 0.32 send them: the sampled token first, then the most likely ones."""
    older = [{"token": "token_id:7", "logprob": -1.5, "top_logprobs": [{"token": "token_id:9", "logprob": -0.5}]}]
    newer = [{"token_id": 7, "logprob": -1.5, "rank": 2, "top_logprobs": [{"token_id": 9, "logprob": -0.5, "rank": 1}]}]
    choice = {"token_ids": [7]}
    with pytest.raises(KeyError, match="token"):
        vllm_client.parse_logprobs([{"content": newer}])  # once this fails, `fill_texts` can go
    request = {"token_ids": [1], "sampling_params": {"n": 1, "max_tokens": 1}}
    for content in (older, newer):
        answer = check_answer("http://host:8000", request, {"choices": [choice | {"logprobs": {"content": content}}]})
        read = vllm_client.parse_logprobs([answer["choices"][0]["logprobs"]])
        assert read == ([[[-0.5, -1.5]]], [[[9, 7]]])


class Client(vllm_client.VLLMClient):
    """TRL's client of a server that is not there; `change` changes its answer."""

    base_url, model = "http://host:8000", "tiny"

    def __init__(self, change):
        self.change, self.session = change, self

    def post(self, url, json):
        choices = [
            {"prompt_token_ids": prompt, "token_ids": [5, 6], "logprobs": logprobs(5, 6)}
            for prompt in json["prompt"]
            for _ in range(json["n"])
        ]
        answer = self.change(choices) or {"choices": choices}
        return SimpleNamespace(status_code=400 if answer == "refused" else 200, json=lambda: answer, text="too long")


def logprobs(*tokens):
    names = [f"token_id:{token}" for token in tokens]
    return {"tokens": names, "token_logprobs": [-0.5] * len(tokens), "top_logprobs": [{name: -0.5} for name in names]}


def asked(change):
    client = Client(change)
    with answers_of_server(SimpleNamespace(vllm_client=client), 1):
        return client.generate([[1, 2], [1, 3]], n=2, max_tokens=2)


def test_an_answer_as_asked_is_used():
    assert asked(lambda choices: None)["completion_ids"] == [[5, 6]] * 4


@pytest.mark.parametrize(
    "change",
    [
        lambda choices: choices.pop(),
        lambda choices: choices.append(choices[0]),
        lambda choices: choices[1].update(prompt_token_ids=[1, 3]),
        lambda choices: choices[3].update(prompt_token_ids=None),
        lambda choices: choices[0].update(token_ids=[5, 6, 7], logprobs=logprobs(5, 6, 7)),
        lambda choices: choices[0].update(token_ids=[], logprobs=logprobs()),
        lambda choices: choices[0].update(token_ids=[5]),
        lambda choices: choices[0].update(token_ids=[5, 7]),
        lambda choices: choices[0].update(logprobs=None),
        lambda choices: choices[1].update(logprobs={}),
        lambda choices: choices[1].update(token_ids=None),
        lambda choices: {"error": "overloaded"},
        lambda choices: [choices],
        lambda choices: choices.clear(),
        lambda choices: "refused",
    ],
)
def test_an_answer_other_than_asked_trains_nothing(change):
    with pytest.raises(VLLMServerError):
        asked(change)
