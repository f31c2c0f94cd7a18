"""Widths of the shipped transformers, without torch: what an import of another trainer's script is compared with."""

from __future__ import annotations

from typing import NamedTuple


class Sizes(NamedTuple):
    """``length``: tokens of a sample. None of these models has experts."""

    hidden: int
    heads: int
    length: int
    vocabulary: int


SIZES: dict[str, Sizes] = {
    "gpt": Sizes(256, 4, 64, 256),
    "gpt2-small": Sizes(768, 12, 1024, 50_257),
    "gpt2-xl": Sizes(1600, 25, 1024, 50_257),
    "gpt-20b": Sizes(6144, 64, 2048, 50_432),
    "llama-3-8b": Sizes(4096, 32, 8192, 128_256),
    "llama-3-70b": Sizes(8192, 64, 8192, 128_256),
    "bert-base": Sizes(768, 12, 384, 30_522),
    "bert-large": Sizes(1024, 16, 384, 30_522),
    "bert-48": Sizes(1024, 16, 384, 30_522),
    "bert-72": Sizes(1024, 16, 384, 30_522),
}
"""By the name of the profile."""
