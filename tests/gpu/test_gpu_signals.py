import pytest
import torch
from places import DTYPES, attention, on_both, to
from support.models.eager_reference import difference, masks_of, reference
from support.models.families import build, make_batch
from test_gpu_sharing import VISION

from vgr_trl.sharing import share_prompts
from vgr_trl.signals import AttentionProbe

ATTENTION = ["flash", "efficient", "math", "flash_attention_2", "flash_attention_3"]


@pytest.mark.parametrize("shared", [False, True], ids=["plain", "shared"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("place", on_both(*ATTENTION, cpu=["math"]))
def test_probe(place, family, dtype, shared, measured):
    """Against the matrices of eager attention in float32 on a CPU; bfloat16 has 8 bits for a mass of at most 1."""
    device, kind = place
    if kind.startswith("flash_attention") and dtype == "float32":
        pytest.skip("flash attention has no float32")
    model, batch = build(family), make_batch(family)
    expected = reference(model, batch)
    model, batch = model.to(device, DTYPES[dtype]), to(batch, device, DTYPES[dtype])
    masks, length = masks_of(batch), batch.completion_length
    rows = slice(masks.vision.size(1) - 1, masks.vision.size(1) - 1 + length)
    with torch.no_grad(), attention(model, kind), AttentionProbe(model, masks, rows=rows) as probe:
        if shared:
            with share_prompts(model, length) as report:
                model(**batch.inputs)
            assert not report.plain
        else:
            model(**batch.inputs)
    for name in ("vision", "instruction"):
        found, exact = getattr(probe.mass, name).cpu(), getattr(expected, name)
        measured[name] = difference(found, exact, expected.valid)
        assert measured[name] < (0.1 if dtype == "bfloat16" else 2e-5)
    assert float(expected.vision.max()) > 0.05
