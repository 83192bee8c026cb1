"""The command line of EasyR1 with options of this library."""

from vgr_trl.integrations.verl.inside_easyr1.main import split_arguments


def test_options_are_taken_out():
    theirs, own = split_arguments(
        ["config=examples/config.yaml", "vgr.preset=vgr_vppo", "vgr.token_weight_clip=[0.5, 2.0]", "trainer.nnodes=2"]
    )
    assert theirs == ["config=examples/config.yaml", "trainer.nnodes=2"]
    assert own == {"preset": "vgr_vppo", "token_weight_clip": [0.5, 2.0]}
