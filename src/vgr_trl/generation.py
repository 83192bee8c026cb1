"""What is around TRL's generation: perturbed images for some completions, answers without an image, a server."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from vgr_trl.batch import Prompts, joined, pixels_of_rows, scoring_inputs
from vgr_trl.data.prompts import format_question, texts_of
from vgr_trl.forward_passes import Passes
from vgr_trl.metrics import StageClock
from vgr_trl.patches import VLLMImages, readable_logprobs
from vgr_trl.registries import BLIND_ANSWERS
from vgr_trl.rollout import ConstructedTrainer, Host, Noise, Rollout, sampling_of_mode, weighted_sums
from vgr_trl.sampling import OLD_LOGPS
from vgr_trl.sharing.sharing import Place
from vgr_trl.signals.perturbation import perturb_images, perturbed_prompts
from vgr_trl.signals.scoring import Measurement
from vgr_trl.utils import DataError, NotFiniteError, VLLMServerError

# ---------------------------------------------------------------------------------------------------------------------
# Questions of a rollout answered again, without the image, from what each completion says of it.


Answers = tuple[dict[str, list[Any]], dict[str, float]]


def blind_answers(rollout: Rollout, host: Host, completion_ids: list[list[int]]) -> Answers:
    """Return one more answer per completion as a column for rewards, None without a description, and metrics.

    All of a process are generated at once, one for each completion, as its own completions are; they are not trained
    on, and not counted among the tokens of the run.
    """
    args = host.args
    texts = host.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    described = [description_in(text, args.blind_tag, args.blind_without_tag == "completion") for text in texts]
    conversations = [
        blind_conversation(args.blind_prompt, question_of(row), found or "")
        for row, found in zip(rollout.rows, described, strict=True)
    ]
    given = host.answer(rollout.rows, conversations)
    answers = [None if found is None else answer for found, answer in zip(described, given, strict=True)]
    share = torch.tensor([answer is not None for answer in answers], device=host.accelerator.device)
    described_share = host.accelerator.gather(share).float().mean().item()
    return {BLIND_ANSWERS: answers}, {"blind/described": described_share}


def description_in(text: str, tag: str, or_all: bool) -> str | None:
    """Return what stands between the first tags of that name, stripped; None, or all of the text, without any."""
    _, opened, rest = text.partition(f"<{tag}>")
    description, closed, _ = rest.partition(f"</{tag}>")
    if opened and closed:
        return description.strip()
    return text if or_all else None


def question_of(row: Mapping[str, Any]) -> str:
    """Return what a row asks, with its options, without marks of images.

    That is its column `problem` if it has one, else the text of the last message of its prompt.
    """
    problem = row.get("problem")
    if isinstance(problem, str):
        text = format_question(problem, row.get("choices"))
    else:
        prompt = row["prompt"]
        text = prompt if isinstance(prompt, str) else "\n".join(texts_of(prompt[-1:]))
    return text.replace("<image>", "").strip()


def blind_conversation(template: str, question: str, description: str) -> list[dict[str, str]]:
    """Return the conversation that asks a question about a description."""
    parts = re.split(r"(\{description\}|\{question\})", template)
    known = {"{description}": description, "{question}": question}
    return [{"role": "user", "content": "".join(known.get(part, part) for part in parts)}]


# ---------------------------------------------------------------------------------------------------------------------
# Completions sampled from a perturbed image, and trained on the clean one.


def with_noise(rollout: Rollout, host: Host) -> Prompts:
    """Return the prompts of a rollout as they are to be generated from; the rollout keeps them.

    The last completions of each prompt get one perturbed image, whichever process they are on.

    Raises:
        DataError: a perturbed image makes other tokens than the image itself.
    """
    args, prompts = host.args, rollout.prompts
    assert prompts is not None
    if not args.noisy_generations or host.mode != "train" or rollout.greedy or rollout.blind:
        return prompts
    step = host.state.global_step + 1
    left = args.noise_left(step, max(host.state.max_steps, step))
    count, strength = args.noisy_generations, 1.0
    if args.noisy_decay_of != "strength":
        count = round(count * left)
    if args.noisy_decay_of != "generations":
        strength = left
    first = host.accelerator.process_index * len(rollout.rows)
    noisy = noisy_rows(len(rollout.rows), host.num_generations, count, first)
    rollout.noise = Noise(noisy, count, strength)
    host.show_columns({"noisy": noisy})
    if not any(noisy) or prompts.images is None:  # another process may have images
        return prompts
    assert rollout.messages is not None
    perturb = partial(
        perturb_images,
        name=args.noisy_perturbation,
        parameters=args.noisy_parameters(strength),
        seed=args.seed,
        step=step,
    )
    numbers = [(first + row) // host.num_generations for row in range(len(rollout.rows))]
    perturbed, own = perturbed_prompts(rollout.messages, numbers, perturb)
    seen = [
        perturbed[own[row]] if is_noisy else conversation
        for row, (conversation, is_noisy) in enumerate(zip(rollout.messages, noisy, strict=True))
    ]
    shown = host.tokenize(seen)
    if [list(ids) for ids in shown.ids] != [list(ids) for ids in prompts.ids]:
        raise DataError(
            f"Images perturbed by {args.noisy_perturbation} make other tokens than the images themselves: switch "
            "noisy_generations off for this processor."
        )
    rollout.noise.prompts = shown
    return shown


def noisy_rows(rows: int, generations: int, count: int, first: int) -> list[bool]:
    """Return which rows of a process are noisy: the last `count` completions of each prompt.

    Args:
        first: number of the first row among those of all processes.
    """
    return [(first + row) % generations >= generations - count for row in range(rows)]


def as_generated(rollout: Rollout, host: Host) -> Rollout:
    """Return the rollout with the old log-probabilities that `noisy_importance` says, and metrics of the noise."""
    noise = rollout.noise
    if noise is None:
        return rollout
    if noise.generations and host.args.noisy_importance == "perturbed":
        rollout.batch = {**rollout.batch, OLD_LOGPS: host.score(scoring_inputs(_as_shown(rollout, noise)))}
    rollout.metrics = rollout.metrics | _metrics(rollout, host, noise)
    return rollout


def _as_shown(rollout: Rollout, noise: Noise) -> dict[str, Any]:
    """The batch with the images that each row was generated from."""
    if noise.prompts is None or noise.prompts.images is None:
        return rollout.batch
    rows = range(len(rollout.rows))
    pixels = pixels_of_rows(noise.prompts.fields, noise.prompts.images, rows, rollout.batch)
    return rollout.batch | {"pixel_values": joined(pixels)}


def _metrics(rollout: Rollout, host: Host, noise: Noise) -> dict[str, float]:
    found = {"noisy/generations": float(noise.generations), "noisy/strength": noise.strength}
    if rollout.rewards is None or not noise.generations:
        return found
    rewards = weighted_sums(rollout.rewards, host.reward_weights).nan_to_num()  # (N of all,)
    noisy = torch.tensor(noisy_rows(len(rewards), host.num_generations, noise.generations, 0), device=rewards.device)
    return found | {
        "noisy/reward": rewards[noisy].mean().item(),
        "noisy/reward_clean": rewards[~noisy].mean().item(),
    }


# ---------------------------------------------------------------------------------------------------------------------
# A server of vLLM: what it answers is read, and one that dies while it is asked is named.


@contextmanager
def named_server(trainer: ConstructedTrainer) -> Iterator[None]:
    """In this block answers of a server are read, and one that cannot be reached is an error that says what to do.

    TRL's client has then asked it again for about a minute.

    Raises:
        VLLMServerError: in the process that asks it.
    """
    if not trainer.use_vllm or trainer.args.vllm_mode != "server":
        yield
        return
    try:
        with readable_logprobs():
            yield
    except OSError as error:  # as are all errors of requests
        raise VLLMServerError(
            f"The vLLM server at {trainer.vllm_generation.vllm_client.base_url} did not answer in step "
            f"{trainer.state.global_step + 1} ({' '.join(str(error).split())[:200]}): start it again, then continue "
            "with --resume_from_checkpoint."
        ) from error


# ---------------------------------------------------------------------------------------------------------------------
# Completions of a rollout, as TRL generates them.


class Generation:
    """Generates with each prompt computed once, and measures attention meanwhile where that is its source.

    Args:
        vllm_images: how a colocated vLLM gets images; None: as they are.
    """

    def __init__(
        self,
        trainer: ConstructedTrainer,
        host: Host,
        measurement: Measurement,
        passes: Passes,
        place: Place,
        vllm_images: VLLMImages | None,
        clock: StageClock,
    ) -> None:
        self._trainer, self._host = trainer, host
        self._measurement, self._vllm_images = measurement, vllm_images
        self._passes, self._place, self._clock = passes, place, clock

    def run(
        self,
        rollout: Rollout | None,
        prompts: Prompts,
        num_generations: int,
        plain: Callable[[Any, Any, Any, int], Any],
    ) -> Any:
        """Return what TRL's `_generate_single_turn` does; the rollout keeps the prompts of its first turn.

        Args:
            num_generations: completions of each prompt, which are adjacent and alike to a server of vLLM.

        Raises:
            VLLMServerError: the server of vLLM does not answer.
        """
        model = self._trainer.model
        first_turn = rollout is not None and rollout.prompts is None
        if rollout is not None and first_turn:
            rollout.prompts = prompts
            prompts = with_noise(rollout, self._host)
            if rollout.noise is not None or rollout.blind:  # what is asked differs within a group
                num_generations = 1
        ids, images = prompts.ids, prompts.images
        if self._vllm_images is not None:
            ids, images = self._vllm_images.prepared(ids, images, prompts.fields)
        with (
            self._clock.stage("generation", model.training),
            self._passes.around(self._place, model),
            _finite_logits(self._host.state.global_step + 1),
            sampling_of_mode(self._trainer),
            named_server(self._trainer),
        ):
            if rollout is None or rollout.blind or not (first_turn and self._measurement.in_generation):
                return plain(ids, images, prompts.fields, num_generations)
            with self._measurement.generation_probe(model) as probe:
                generated = plain(ids, images, prompts.fields, num_generations)
            rollout.generated_mass = probe.mass
            return generated


@contextmanager
def _finite_logits(step: int) -> Iterator[None]:
    """Say in one sentence what sampling says of NaN; on a GPU the error is one of CUDA, which says nothing of it."""
    try:
        yield
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        raise NotFiniteError(
            f"The model's logits are NaN or infinite in generation, at step {step}: its weights are broken, or what it "
            "computes overflows, so look at the newest checkpoint, or use bfloat16 instead of float16."
        ) from error
