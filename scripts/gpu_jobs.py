"""The models that ``scripts/gpu-check`` trains: small ones to compare numbers, one with enough work to time."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from penstock.examples import gpt, moe
from penstock.examples.synthetic import TokenJob

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks" / "papers"))
from paper_models import awd_lstm

small = gpt.make("gpt-check", gpt.Config(blocks=6, width=64, heads=2, length=32, vocabulary=128), batch_size=16)
"""Eight layers, so that it has stages enough for two on each of four ranks."""

experts = moe.make(
    "moe-check",
    moe.Config(
        blocks=2,
        width=64,
        heads=2,
        key_value_heads=2,
        inner=64,
        length=32,
        vocabulary=128,
        experts=4,
        per_token=2,
    ),
    batch_size=16,
)
"""Layers with experts, which ranks share out."""

timed = gpt.make("gpt-timed", gpt.Config(blocks=8, width=1024, heads=16, length=512, vocabulary=8192), batch_size=32)
"""117 million parameters; a micro-batch of four samples is tens of milliseconds of an H100 in fp32."""

recurrent = TokenJob("lstm-check", partial(awd_lstm.layers, 64, 32, 64), batch_size=16, length=8, vocabulary=64)
"""LSTMs, whose weights cuDNN needs side by side."""
