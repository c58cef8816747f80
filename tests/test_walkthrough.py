"""The README and the tutorial, followed command by command on loopback; `scripts/newcomer` uses a fresh clone."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest
from tests.support.aws_commands import check_aws_command
from tests.support.walkthrough import OTHERS, PAGES, Step, Walk, chat_model, steps, world

# What sets up the environment, which the tests have, and what needs a whole clone.
NOT_HERE = OTHERS | {"python3", ".", "pip", "make"}
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="the pages' requests are curl's")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.timeout(900)
def test_every_command_of_a_page_succeeds_in_order(page: Path, tmp_path: Path) -> None:
    followed = [step for step in steps(page) if step.program not in NOT_HERE]
    chat_model(tmp_path / "home" / "my-model")
    with world(tmp_path / "world") as (environment, tools):
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        with Walk(tmp_path / "home", environment) as walk:
            for step in followed:
                output = walk.follow(step)
                if step.program == "curl":
                    assert '"error"' not in output, f"{step.place}: {output}"
        for step in followed:
            if step.program == "aws":
                check_aws_command(shlex.split(step.text.partition("|")[0]))
        if page.stem == "tutorial":
            assert tools.calls("aws cloudformation deploy")


def test_pages_have_steps_of_each_kind() -> None:
    tutorial = steps(PAGES[0])
    assert {step.file for step in tutorial} > {"summarise.py", "pool.toml", "Dockerfile.summarise"}
    assert {step.program for step in tutorial} >= {"teneral", "curl", "docker", "aws", "pip", "echo"}
    readme = [shortened(step) for step in steps(PAGES[1])]
    assert "pip install" in readme
    assert "teneral serve" in readme


def shortened(step: Step) -> str:
    return " ".join(step.text.split()[:2])
