"""The arithmetic of `scripts/study.py`, on numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.study import swing, zero_loss_rate


def test_what_a_reference_allows() -> None:
    """e^(1/beta) = 4: odds of 1:3 become 4:3, none stay none, all stay all."""
    found = zero_loss_rate(np.array([0.0, 0.25, 1.0]), 1 / np.log(4))
    assert found == pytest.approx([0.0, 4 / 7, 1.0])


def test_a_reward_that_goes_to_and_fro_alternates_by_its_height() -> None:
    """Of 0.4, 0.6, 0.4, ... every collection stands 0.2 off its neighbours, the odd places of a period above."""
    deviation, alternation = swing(np.array([0.4, 0.6] * 6), 4)
    assert deviation == pytest.approx(0.2)
    assert alternation == pytest.approx([0.2, 0.2])


def test_the_sign_of_an_alternation_goes_with_the_place_since_the_refresh() -> None:
    deviation, alternation = swing(np.array([0.6, 0.4] * 6), 4)
    assert deviation == pytest.approx(0.2)
    assert alternation == pytest.approx([-0.2, -0.2])


def test_a_straight_climb_does_not_swing() -> None:
    deviation, alternation = swing(np.linspace(0.1, 0.9, 12), 4)
    assert deviation == pytest.approx(0, abs=1e-12)
    assert alternation == pytest.approx([0, 0], abs=1e-12)
