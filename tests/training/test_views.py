from functools import partial

import pytest
import torch
from peft import LoraConfig
from support.trainers import emitted, letters_reward, logged, tiny_model, weights
from transformers import TrainerCallback

from vgr_trl import registries
from vgr_trl.passes import run_pass
from vgr_trl.reporting.records import read_run
from vgr_trl.signals import scoring
from vgr_trl.signals.named import columns_to_signals, signals_to_columns
from vgr_trl.signals.perturbation import Seen
from vgr_trl.signals.ratios import jensen_shannon

FULL = {"share_prompts": "off", "kl_coef": 0.1, "kl_penalty": "full"}
BLURRED = {"signals": ["jsd", "stability"], "further_perturbations": ["gaussian_blur"]}
HINT = "the circle is red"


def rollout_of(run, rollouts):
    run.train()
    return rollouts[-1]


def noted_passes(monkeypatch):
    passes, plain = [], run_pass.run_pass

    def noted(run, model, batch, *more, **given):
        passes.append(batch)
        return plain(run, model, batch, *more, **given)

    monkeypatch.setattr(run_pass, "run_pass", noted)
    return passes


@pytest.mark.parametrize(("share", "over"), [("on", "mean"), ("off", "min")])
def test_the_question_without_its_image(share, over, vision_trainer, rollouts, monkeypatch):
    """In one pass with a perturbed image, and equal to each row alone, with no token of the image."""
    run = vision_trainer(
        max_steps=1, credit_rules=["trajectory_scale"], signals=["stability"], share_prompts=share,
        perturbation="remove_image", further_perturbations=["gaussian_blur"], learning_rate=0.0,
        dependency_over=over,
    )  # fmt: skip
    passes = noted_passes(monkeypatch)
    rollout = rollout_of(run, rollouts)
    signals = rollout.signals
    expected, _ = asked_with_images(run, rollout, lambda images, row, seed: Seen([]))
    valid = signals.mask.bool()
    assert torch.allclose(signals.views["remove_image"][valid], expected[valid], atol=1e-5)
    text, blurred = signals.views["remove_image"], signals.views["gaussian_blur"]
    each = torch.stack([(seen - signals.logps).exp() - (seen - signals.logps) - 1 for seen in (text, blurred)])
    dependency = each.mean(0) if over == "mean" else each.amin(0)
    assert torch.allclose(signals.dependency[valid], dependency[valid], atol=1e-5)
    assert torch.allclose(signals.extra["stability"][valid], (1 - (text.exp() - blurred.exp()).abs())[valid], atol=1e-6)
    kept = columns_to_signals(signals_to_columns(signals))  # as in the replay buffer
    assert torch.equal(kept.views["gaussian_blur"], blurred)
    perturbed = passes[-1]
    assert perturbed.images.num_images == [0] * 8 + [1] * 8
    image = run.processing_class.tokenizer.convert_tokens_to_ids(run.processing_class.image_token)
    assert (perturbed.ids == image).any(1).tolist() == [False] * 8 + [True] * 8


def logits_of(run, batch):
    with torch.no_grad():
        logits = run.model(**batch.model_inputs).logits
    return logits[:, batch.width - 1 : -1].float() / run.temperature


@pytest.mark.parametrize("changed", [{"signals": ["jsd"]}, FULL | BLURRED])
def test_the_shift_of_distributions_is_that_of_plain_logits(changed, vision_trainer, rollouts, monkeypatch):
    run = vision_trainer(
        max_steps=1, credit_rules=["vepo"], perturbation="mask_image", learning_rate=0.0,
        temperature=0.7, compute_attention_metrics=False, **changed,
    )  # fmt: skip
    passes = noted_passes(monkeypatch)
    signals = rollout_of(run, rollouts).signals
    first, second = (logits_of(run, passed) for passed in (passes[0], passes[-1]))
    second = second[: len(first)]  # those under the second perturbation stand behind
    mask, logps = signals.mask.bool(), torch.log_softmax(second, -1)
    assert torch.allclose(signals.jsd[mask], jensen_shannon(first, second)[mask], atol=1e-5)
    assert torch.allclose(signals.perturbed_entropies[mask], -(logps.exp() * logps).sum(-1)[mask], atol=1e-4)
    assert signals.jsd[mask].max() > 1e-4
    assert logged(run, "signals/jsd") == [pytest.approx(signals.jsd[mask].mean().item(), abs=1e-6)]
    assert logged(run, "credit/vepo/token_fraction")[0] < 0.5


def test_completions_behind_perturbed_images_of_their_own(vision_trainer, rollouts):
    """Prompts of a group are then alike in tokens alone, so none is shared in that pass: as without sharing."""
    options = {"max_steps": 1, "credit_rules": ["trajectory_scale"], "perturb_per": "completion", "learning_rate": 0.0}
    shared, plain = (rollout_of(vision_trainer(**options, share_prompts=share), rollouts) for share in ("on", "off"))
    assert torch.equal(shared.batch.completion_ids, plain.batch.completion_ids)
    valid = plain.signals.mask.bool()
    assert torch.allclose(shared.signals.dependency[valid], plain.signals.dependency[valid], rtol=1e-3, atol=1e-7)
    assert len({image.tobytes() for (image,) in shared.perturbed_images.values()}) == len(valid)


@pytest.fixture
def closer(monkeypatch):
    """A registered view: what is in the box, wider, the whole image behind it, and a text."""
    registry, crop = registries.views, registries.views.load("crop_to_box")
    monkeypatch.setattr(registry, "_own", dict(registry._own))

    @registry.register("closer")
    def closer(images, row, *, seed):
        found = crop(images, row, crop_margin=0.0)
        return found and Seen([found[0].resize((2 * found[0].width, found[0].height)), *images], HINT)

    return closer


def gradients_of(run):
    """The gradients by name that the last optimizer step will have read."""
    found = {}

    def keep(*args, **kwargs):
        found.update({name: weight.grad.clone() for name, weight in run.model.named_parameters()})

    run.add_callback(type("Keep", (TrainerCallback,), {"on_pre_optimizer_step": keep}))
    return found


def assert_gradients(found, run):
    """They are those that the model has now."""
    expected = {name: weight.grad for name, weight in run.model.named_parameters() if weight.grad is not None}
    largest = max(gradient.abs().max() for gradient in expected.values())
    assert largest > 1e-4
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 2e-6 * largest, name


def with_boxes(rows):
    """Every other row has a box, of other sides each."""
    boxes = [[0.0, 0.0, 0.5, 1.0], None, [0.25, 0.5, 1.0, 0.75], None]
    return rows.add_column("bbox", [boxes[row % 4] for row in range(len(rows))])


@pytest.fixture
def taught(closer, vision_trainer, model_folder):
    """Builds trainers of a model in float64 that stands still, with a teacher that sees `closer`; options by name."""

    def build(rewards=letters_reward, **options):
        still = {"max_steps": 1, "learning_rate": 0.0, "max_grad_norm": 0.0, "shuffle_dataset": False}
        model, rows = tiny_model(model_folder).double(), with_boxes(vision_trainer.rows)
        return vision_trainer(rewards, rows, model=model, **{"teacher_view": "closer", **still, **options})

    return build


def asked_with_images(run, rollout, view):
    """(N, T) log-probabilities, each row alone behind its prompt with the images of the view; NaN without a view.

    And of the rows with a view those of all tokens, (T, vocabulary) each.
    """
    rows, every, processor = [], [], run.processing_class
    for messages, row, completion in zip(rollout.messages, rollout.rows, rollout.batch.completion_ids, strict=True):
        own = [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
        if (seen := view(own, row, seed=0)) is None:
            rows.append(torch.full(completion.shape, torch.nan, dtype=torch.float64))
            continue
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        asked, end, behind = text.rpartition("<|im_end|>")
        text = asked + (seen.text and f"\n\n{seen.text}") + end + behind
        shown = {"images": [[*seen.images]]} if seen.images else {}
        marks = "<|vision_start|><|image_pad|><|vision_end|>"
        inputs = processor(text=[text.replace(marks, marks * len(seen.images))], **shown, return_tensors="pt")
        prompt = inputs["input_ids"].size(1)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], completion[None]], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, len(completion)))
        with torch.no_grad():
            logits = run.model(**inputs).logits[0, prompt - 1 : -1] / run.temperature
        every.append(logits.log_softmax(-1))
        rows.append(every[-1].gather(-1, completion[:, None])[:, 0])
    return torch.stack(rows), every


@pytest.mark.parametrize("share", ["on", "off"])
def test_a_teacher_with_more_image_tokens(share, closer, taught, rollouts, monkeypatch):
    """As each row alone, in float64; rows without a box have no gap, weight 1, and nothing is added to them."""
    run = taught(
        credit_rules=["rlsd", "distil"], share_prompts=share, perturbation="gaussian_blur", signals=["stability"],
        further_perturbations=["mask_image"], rollout_log_steps=1,
    )  # fmt: skip
    passes, computed = noted_passes(monkeypatch), {"tokens": 0, "patches": 0}

    def count(name, layer, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        computed[name] += (
            len(passes) == 3 and not rollouts and hidden.shape[:-1].numel()
        )  # the policy's and that of perturbations before

    parts = {"tokens": run.model.model.language_model.layers[0], "patches": run.model.model.visual.blocks[0]}
    for name, layer in parts.items():
        layer.register_forward_pre_hook(partial(count, name), with_kwargs=True)
    rollout = rollout_of(run, rollouts)
    signals, valid = rollout.signals, rollout.signals.mask.bool()
    batch, patches = passes[-1], passes[-1].images.tensors["image_grid_thw"].prod(-1)
    limit = 2 * batch.width + 8 * batch.length if share == "on" else 8 * (batch.width + batch.length)
    assert 0 < computed["tokens"] <= 1.1 * limit
    assert computed["patches"] == patches.sum() / (4 if share == "on" else 1)  # each prompt's once
    expected, every = asked_with_images(run, rollout, closer)
    best = [each.argmax(-1).tolist() for each in every]
    seen = signals.views["teacher"]
    assert expected.isnan().any(1).tolist() == [False] * 4 + [True] * 4
    assert torch.allclose(seen.double()[valid], expected[valid], atol=1e-6, equal_nan=True)
    assert (seen - signals.logps)[:4][valid[:4]].abs().max() > 1e-4
    assert batch.images.num_images == [2] * 4, "rows without the view are not computed"
    assert set(rollout.teacher_images) == set(range(4))
    (record,) = read_run(run.args.output_dir).records()  # of two prompts, the first with a teacher
    taught, alone = record.completions[0], record.completions[-1]
    sizes = [(image.width, image.height) for image in taught.teacher_images]
    assert sizes == [image.size for image in rollout.teacher_images[0]]
    length, decode = len(taught.tokens), run.processing_class.tokenizer.decode
    assert taught.teacher == [decode([token]) for token in best[0][:length]]
    gaps = (expected - signals.logps.double())[0, :length]
    assert taught.signals["teacher_gap"] == pytest.approx(gaps.tolist(), abs=1e-5)
    assert (alone.teacher, alone.teacher_images, alone.signals.get("teacher_gap")) == (None, [], None)


@pytest.mark.parametrize(("rule", "moves"), [("distil", True), ("rlsd", False)])
def test_what_a_teacher_adds_trains_groups_without_variance(rule, moves, taught, caplog):
    """Each step counts as one with a gradient, where the rule adds one."""
    run = taught(
        lambda completions, **columns: [1.0] * len(completions), credit_rules=[rule], max_completion_length=2,
        max_steps=5, learning_rate=1e-3,
    )  # fmt: skip
    before = weights(run)
    run.train()
    assert any("No group has had a gradient" in record.message for record in caplog.records) != moves
    assert torch.equal(before, weights(run)) != moves
    assert set(logged(run, "frac_reward_zero_std")) == {1.0}


@pytest.mark.parametrize("adapts", [False, True])
def test_the_reference_teaches(adapts, closer, taught, model_folder, rollouts):
    adapter = LoraConfig(target_modules=["q_proj"]) if adapts else None
    run = taught(max_steps=2, learning_rate=0.1, teacher_weights="reference", peft_config=adapter)
    run.train()
    run.model = tiny_model(model_folder).double()
    for rollout in rollouts:
        (expected, _), valid = asked_with_images(run, rollout, closer), rollout.signals.mask.bool()
        teacher = rollout.signals.views["teacher"].double()
        assert torch.allclose(teacher[valid], expected[valid], atol=1e-5, equal_nan=True)
    assert "reference_logps" not in rollouts[0].batch.columns


@pytest.mark.parametrize(
    ("kind", "top", "options"),
    [("forward", 5, {}), ("reverse", 0, {"gradient_checkpointing": True}), ("jensen_shannon", 3, {"temperature": 0.7})],
)
def test_gradients_of_the_divergence_from_a_teacher(kind, top, options, closer, taught, rollouts, monkeypatch):
    """As by autograd of the formula on all logits in float64, whole micro-batches and one position at a time."""
    numbers = {"teacher_divergence_coef": 0.5, "teacher_divergence_kind": kind, "gated_distillation_coef": 0.2}
    run = taught(
        lambda completions, **columns: [1.0] * len(completions), teacher_top_k=top, plugin_options=numbers,
        loss_terms=["teacher_divergence", "gated_distillation"], **options,
    )  # fmt: skip
    monkeypatch.setitem(scoring.LOGITS_AT_A_TIME, "cpu", 1)
    found = gradients_of(run)
    rollout = rollout_of(run, rollouts)
    batch, valid = rollout.batch, rollout.signals.mask.bool()
    sampled, every = asked_with_images(run, rollout, closer)
    seen = ~sampled[:, 0].isnan()  # (N,)
    known, teacher = valid & seen.unsqueeze(1), torch.cat(every)[valid[seen].flatten()]
    run.model.zero_grad()
    logits = emitted(run.model, batch) / run.temperature
    logps = logits.log_softmax(-1)[known]  # (K, vocabulary)
    kept = torch.zeros_like(logps, dtype=torch.bool).scatter(1, teacher.topk(top or teacher.size(1)).indices, True)

    def fold(values):  # the others as one
        others = [] if top == 0 else [values.exp().masked_fill(kept, 0).sum(1, keepdim=True)]
        return torch.cat([values.exp()[kept].view(len(values), -1), *others], 1)

    p, q = fold(teacher), fold(logps)
    mixture, kl = (p + q) / 2, lambda one, other: (one * (one / other).log()).sum()
    formula = {"forward": kl(p, q), "reverse": kl(q, p), "jensen_shannon": (kl(p, mixture) + kl(q, mixture)) / 2}
    divergence = formula[kind]
    tokens = batch.completion_ids[known].unsqueeze(1)
    gap = teacher.gather(1, tokens) - logps.gather(1, tokens)
    loss = 0.5 * divergence + 0.2 * ((5 * gap).sigmoid().detach() * gap).sum()
    (loss / valid.sum()).backward()
    assert_gradients(found, run)
    assert logged(run, "teacher_divergence")[0] == pytest.approx((divergence / valid.sum()).item(), rel=1e-3)
    assert 0 < logged(run, "teacher_gate")[0] < 1


def test_a_teacher_that_sees_the_clean_image(vision_trainer, rollouts):
    """Noisy completions are compared with the image that they were sampled from; the others have a gap of 0."""
    run = vision_trainer(
        max_steps=1, learning_rate=0.0, teacher_view="clean", noisy_generations=2, noisy_perturbation="mask_image"
    )
    signals = rollout_of(run, rollouts).signals
    gap, valid = signals.extra["teacher_gap"], signals.mask.bool()
    noisy = torch.tensor([False, False, True, True] * 2).unsqueeze(1) & valid
    assert gap[valid & ~noisy].abs().max() < 1e-5 < 1e-4 < gap[noisy].abs().max()
    assert torch.allclose(signals.views["teacher"][valid], signals.logps[valid], atol=1e-5)


def test_a_teacher_of_failures_with_another_for_the_description(closer, taught, rollouts, monkeypatch):
    """Gradients as by autograd on all logits in float64; a row that did not fail has no teacher, nor a pass."""
    registries.views.register("told")(told := lambda images, row, seed: Seen(images, "the shape is round"))
    wrong = [0.0, 1.0, None, -1.0] * 2

    def judge(completions, **columns):
        return wrong[: len(completions)]

    run = taught(
        judge, teacher_description_view="told", distil_failed_only="judge", blind_tag="answer", teacher_top_k=0,
        loss_terms=["teacher_divergence"], reward_weights=[0.0],
        plugin_options={"teacher_divergence_coef": 0.5, "teacher_divergence_kind": "forward"},
    )  # fmt: skip
    plain, tokenizer = run._generate_single_turn, run.processing_class.tokenizer
    opens, closes = tokenizer.convert_tokens_to_ids(["<answer>", "</answer>"])

    def generate(*args, **kwargs):
        ids, *rest = plain(*args, **kwargs)
        ids = [[token for token in row if token not in (opens, closes)] for row in ids]
        ids[0][1:2], ids[3][2:3] = [closes], [closes]
        return ids, *rest

    run._generate_single_turn = generate
    passes, found = noted_passes(monkeypatch), gradients_of(run)
    rollout = rollout_of(run, rollouts)
    batch, valid = rollout.batch, rollout.signals.mask.bool()
    views = [len(passed) for passed in passes if len(passed) < 8]
    assert views == [2, 4], "failures with a box; failures"
    failed = torch.tensor([reward is not None and reward <= 0 for reward in wrong])
    within = torch.zeros_like(valid)
    within[0, :2], within[3, :3] = True, True
    _, boxed = asked_with_images(run, rollout, closer)
    _, hinted = asked_with_images(run, rollout, told)
    run.model.zero_grad()
    logps = (emitted(run.model, batch) / run.temperature).log_softmax(-1)  # (N, T, vocabulary)
    teacher = torch.stack([*boxed, *hinted[4:]])  # of the first prompt with its box; the second has none
    teacher = torch.where(within.unsqueeze(-1), torch.stack(hinted), teacher)
    has_teacher = torch.tensor([True] * 4 + [False] * 4).unsqueeze(1) | within
    known = valid & failed.unsqueeze(1) & has_teacher
    divergence = (teacher[known].exp() * (teacher[known] - logps[known])).sum()
    (0.5 * divergence / valid.sum()).backward()
    assert known.any(1).tolist() == [True, False, False, True] + [False] * 4
    assert_gradients(found, run)
