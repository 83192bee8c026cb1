"""What TRL's scoring and its fused head do with a batch."""

import ast

from trl_assumptions import TRAINER, UTILS, Assumption, Source
from trl_assumptions.reading import calls, parameters, says, values_returned

SCORING = "_get_per_token_logps_and_entropies"
HEADS = "efficiency/loss_mask.py, sharing/sharing.py"


def of_scoring(*texts: str):
    return lambda source: says(source.method(SCORING), *texts)


def of_the_head(*texts: str):
    return lambda source: says(source.function("_fused_forward", UTILS), *texts)


def looks_the_backbone_up(source: Source) -> bool:
    """Within the forward pass, not before it."""
    forward = source.function("_fused_forward", UTILS)
    return says(forward, "backbone_outputs = getattr(self, ") or says(forward, "backbone_outputs = self.base_model(")


def output_of_two_fields(source: Source) -> bool:
    fields = list(getattr(source.owner("FusedCausalLMOutput", UTILS), "body", []))
    optional = {node.target.id for node in fields if isinstance(node, ast.AnnAssign) and node.value is not None}
    return {"log_probs", "entropy"} <= optional and len(optional) == sum(isinstance(n, ast.AnnAssign) for n in fields)


def heads_at_the_temperature_of_the_run(source: Source) -> bool:
    given = [ast.unparse(call) for call in calls(source.method("__init__"), "add_fused_lm_head")]
    at_temperature = [call for call in given if "temperature=self.temperature" in call]
    return len(given) == len(at_temperature) == 2 and "outputs=('log_probs', 'entropy')" in given[0]


ASSUMPTIONS = [
    Assumption(
        "scoring returns three values and takes model, input_ids, attention_mask, logits_to_keep and batch_size",
        "trainer.py, rollout.py, forward_passes.py",
        lambda source: (
            values_returned(source.method(SCORING)) == {3}
            and parameters(source.method(SCORING))[:5]
            == ["model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"]
        ),
        (TRAINER, "return logps, entropies, aux_loss", "return logps, entropies"),
    ),
    Assumption(
        "labels are -100 in padding and in front of the completion",
        HEADS,
        of_scoring(".masked_fill(attention_mask_batch == 0, -100)", "labels[:, :-logits_to_keep] = -100"),
        (TRAINER, "labels[:, :-logits_to_keep] = -100", "labels[:, :-logits_to_keep] = 0"),
    ),
    Assumption(
        "scoring calls the model with labels and fused_lm_head=True by name",
        f"{HEADS}, signals/scoring.py, critic.py",
        of_scoring("model(**model_inputs, labels=labels, fused_lm_head=True)"),
        (TRAINER, "labels=labels, fused_lm_head=True)", "labels=labels)"),
    ),
    Assumption(
        "scoring takes the last columns of log_probs and entropy, as many as the completion has",
        f"{HEADS}, critic.py",
        of_scoring("outputs.log_probs[:, -logits_to_keep:]", "outputs.entropy[:, -logits_to_keep:]"),
        (TRAINER, "outputs.log_probs[:, -logits_to_keep:]", "outputs.logps[:, -logits_to_keep:]"),
    ),
    Assumption(
        "the head gives 0 where the label is -100",
        HEADS,
        of_the_head("mask = labels != -100"),
        (UTILS, "mask = labels != -100", "mask = labels != -1"),
    ),
    Assumption(
        "the head shifts labels and hidden states by one, or takes shift_labels as they are",
        HEADS,
        of_the_head(
            "if shift_labels is None:", "backbone_outputs.last_hidden_state[:, :-1]", "labels = labels[:, 1:]",
            "labels = shift_labels",
        ),
        (UTILS, "backbone_outputs.last_hidden_state[:, :-1]", "backbone_outputs.last_hidden_state[:, 1:]"),
    ),
    Assumption(
        "the head looks its base model up at each call",
        f"{HEADS}, signals/scoring.py, loss.py",
        looks_the_backbone_up,
        (UTILS, "backbone_outputs = getattr(self, backbone_attr)(", "backbone_outputs = backbone("),
    ),
    Assumption(
        "the head is a forward method of the model object itself",
        f"{HEADS}, signals/scoring.py, utils.py",
        lambda source: says(source.function("add_fused_lm_head", UTILS), "model.forward = types.MethodType("),
        (UTILS, "model.forward = types.MethodType(_fused_forward, model)", "type(model).forward = _fused_forward"),
    ),
    Assumption(
        "the head returns a FusedCausalLMOutput, whose log_probs and entropy may be left out as all other fields",
        "signals/scoring.py, critic.py",
        output_of_two_fields,
        (UTILS, "    log_probs: torch.Tensor | None = None", "    logps: torch.Tensor | None = None"),
    ),
    Assumption(
        "policy and reference get the head with the temperature of the run, the policy also entropies",
        "loss.py, rollout.py",
        heads_at_the_temperature_of_the_run,
        (TRAINER, "self.ref_model, temperature=self.temperature", "self.ref_model, temperature=1.0"),
    ),
]  # fmt: skip
