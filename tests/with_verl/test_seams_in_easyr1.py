"""What is relied on in EasyR1, when it is not there."""

import pytest
from actor_on_cpu import hooks_importable
from taking_away import take_away

from vgr_trl.integrations.verl.options import OF_EASYR1, check_points
from vgr_trl.utils import ConfigError


@pytest.mark.parametrize("point", OF_EASYR1, ids=lambda point: point.name)
def test_each_is_named_when_it_is_missing(point, monkeypatch):
    with hooks_importable():
        take_away(point, monkeypatch)
        with pytest.raises(ConfigError, match=f" is installed, and lacks .*{point.name}.*: install EasyR1 at b44b311,"):
            check_points(OF_EASYR1, "EasyR1 at b44b311")
