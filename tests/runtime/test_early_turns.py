"""While the weights arrive, waiting requests take the same turns as later."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.early_rig import TIMEOUT_S, EarlyRig, exact_tokens, packed_tiny

from teneral.runtime.step.requests import Priority

PROMPT = (1, 2, 3, 4, 5)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_tiny(tmp_path_factory.mktemp("llama"))


def test_tenants_and_priorities_hold_from_the_first_request_on(artifact: Path) -> None:
    with EarlyRig(artifact, max_running=1) as rig:
        asked = [
            ("batch", {"tenant": "c", "priority": Priority.BATCH}),
            ("many 1", {"tenant": "many"}),
            ("many 2", {"tenant": "many"}),
            ("many 3", {"tenant": "many"}),
            ("one", {"tenant": "one"}),
        ]
        generations = {name: rig.submit(PROMPT, max_tokens=3, **fields) for name, fields in asked}
        rig.start()
        rig.refine()
        expected = exact_tokens(PROMPT, 3)
        for generation in generations.values():
            assert generation.result(TIMEOUT_S).tokens == expected
        order = sorted(generations, key=lambda name: generations[name].timings.started_s or 0.0)
        assert order == ["many 1", "one", "many 2", "many 3", "batch"]
