import pytest
from trl import GRPOTrainer

from vgr_trl.errors import UnsupportedTRLError
from vgr_trl.training.host import check_attributes, check_seams


def test_the_installed_trl_is_accepted():
    check_seams(GRPOTrainer)


@pytest.mark.parametrize("version", ["1.15.0", "1.17.0", "1.17.0.dev0", "2.0", "0.29.1"])
def test_an_untested_release_is_refused(version):
    with pytest.raises(UnsupportedTRLError) as caught:
        check_seams(GRPOTrainer, installed=version)
    assert str(caught.value) == (
        f"TRL {version} is installed, but vgr_trl is tested with trl>=1.16,<1.17; install one of those: "
        'pip install "trl>=1.16,<1.17".'
    )
    assert isinstance(caught.value, RuntimeError)


def test_a_missing_method_is_named():
    class Trainer:
        pass

    with pytest.raises(UnsupportedTRLError, match="Trainer has no method _calculate_rewards"):
        check_seams(Trainer, installed="1.16.0")


def test_a_changed_signature_is_named():
    class Trainer(GRPOTrainer):
        def _compute_loss(self, model, batch):
            raise AssertionError

    with pytest.raises(UnsupportedTRLError, match="_compute_loss has no parameter inputs"):
        check_seams(Trainer, installed="1.16.0")


def test_a_missing_attribute_of_the_constructed_trainer_is_named():
    with pytest.raises(UnsupportedTRLError, match="its trainer has no attribute _buffered_inputs"):
        check_attributes(object())
