"""The keys we take for DeepSpeed's own are in DeepSpeed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ds_infinipipe.config.deepspeed import DEEPSPEED_KEYS


def test_deepspeed_reads_every_key_we_take_for_its_own() -> None:
    spec = find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    text = "".join(
        p.read_text(encoding="utf-8") for p in sorted(Path(spec.origin).parent.rglob("*.py"))
    )
    missing = {k for k in DEEPSPEED_KEYS if f'"{k}"' not in text and f"'{k}'" not in text}
    assert missing == set()
