"""Adapters that PEFT itself makes and saves: its logits and greedy tokens are those of the native core.

`scripts/conformance-peft` installs it; elsewhere this is skipped, and `test_execution.py` compares with merged models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.adapters.test_execution import PROMPT, load, native, stepper
from tests.support.adapters import SETS, greedy
from tests.support.native import ISAS
from tests.support.tiny_models import tiny_model

from teneral.runtime.tensors import DType

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)

peft = pytest.importorskip("peft", reason="needs PEFT: run scripts/conformance-peft")


def adapted(folder: Path, **options: Any) -> Any:
    """A model that PEFT has put a random adapter into, which it saves in the folder."""
    torch.manual_seed(3)
    defaults = {"r": 8, "lora_alpha": 8, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(**{**defaults, **options})).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("modules", SETS)
def test_logits_and_greedy_tokens_are_pefts(modules: str, tmp_path: Path) -> None:
    model = adapted(tmp_path, **SETS[modules])
    base = tiny_model("llama")
    steps = stepper(native(ISAS[0], base, DType.F32), base, DType.F32, a=load(tmp_path, base))
    logits = steps.step({"a": PROMPT})["a"]
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0].numpy()
        plain = base(torch.tensor([PROMPT])).logits[0].numpy()
    assert np.abs(plain - expected).max() > 0.05
    np.testing.assert_allclose(logits, expected, atol=5e-4, rtol=1e-3)
    tokens: list[int] = []
    for _ in range(8):
        tokens.append(int(np.argmax(logits[-1])))
        logits = steps.step({"a": tokens[-1:]})["a"]
    assert tokens == greedy(model, PROMPT, 8)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}])
def test_what_is_not_supported_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    from teneral.runtime.errors import AdapterError

    adapted(tmp_path, target_modules=["q_proj"], **options)
    with pytest.raises(AdapterError, match=next(iter(options))):
        load(tmp_path, tiny_model("llama"))
