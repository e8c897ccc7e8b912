"""A short soak; ``make soak`` runs the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.soak import WARM, soak


def test_nothing_stays_behind(tmp_path: Path) -> None:
    figures = soak(tmp_path, requests=300, seconds=60)
    print(figures)
    assert figures["wrong"] == []
    assert figures["requests"] == 300
    assert {"200", "400"} <= figures["statuses"].keys()
    assert figures["answers_compared"] > 20


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nothing_stays_behind_for_longer(tmp_path: Path) -> None:
    figures = soak(tmp_path, requests=2 * WARM, seconds=1000)
    print(figures)
    assert figures["wrong"] == []
    assert figures["requests_to_warm_up"] == WARM
