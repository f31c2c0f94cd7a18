"""FLOPs of a sample, by hand."""

from __future__ import annotations

from penstock.examples.shapes import SHAPES
from penstock.shapes import parameters
from penstock.shapes.flops import flops_per_sample

LLAMA = SHAPES["llama-3-70b"]


def test_flops_are_six_per_weight_and_token_and_half_the_square_of_attention() -> None:
    embedding = LLAMA.vocabulary * LLAMA.hidden
    norms = (2 * LLAMA.layers + 1) * LLAMA.hidden
    weights = parameters.total(LLAMA) - embedding - norms
    length = LLAMA.sequence_length
    attention = LLAMA.layers * 3 * (4 * length**2 * LLAMA.hidden) // 2
    assert flops_per_sample(LLAMA) == 6 * weights * length + attention


def test_an_encoder_computes_the_whole_square() -> None:
    bert = SHAPES["bert-large"]
    decoder = bert.model_copy(update={"token_types": 0})
    square = 4 * bert.sequence_length**2 * bert.hidden
    assert flops_per_sample(bert) - flops_per_sample(decoder) == bert.layers * 3 * square // 2
