"""Random products of degrees: what is refused here is what megatron-core refuses, and at the moment that is said.

That two contexts' parts divide the sequence, and that layers divide among ranks before anything is built, are checks of
Megatron-LM's script, which is in no package; the latter is seen when layers are built.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from installed import RELEASES, under

from penstock.schemas.transformers.shape import Experts, TransformerShape
from penstock.shapes.layout import Layout, layers_of_stages
from penstock.shapes.legality import Broken, broken

(RELEASE,) = (f"megatron-core-{each}" for each in RELEASES["megatron-core"])
ROWS = 400
FIRST = {
    "configuration": {"heads", "key_value_heads", "experts"},
    "groups": {"product", "expert_groups"},
}
"""Checks that end a job before the other rules are reached, and the rules of each."""
pytestmark = pytest.mark.timeout(900)


def drawn(random: Random) -> dict[str, Any]:
    """Draw a row of degrees with a model, of which about half are legal together."""
    experts = random.choice([None, None, 4, 12])
    tp, pp = random.choice([1, 2, 2, 3, 4]), random.choice([1, 2, 2, 4])
    cp = random.choice([1, 1, 2])
    vpp = random.choice([None, 2, 3]) if pp > 1 else None
    heads = random.choice([12, 16, 24])
    gpus = tp * cp * pp * random.choice([1, 2, 4, 6]) if random.random() < 0.8 else random.choice([6, 10, 20])
    return {
        "layers": random.choice([10, 12, 16, 24]),
        "hidden": heads * 4,
        "heads": heads,
        "kv_heads": random.choice([heads, heads // 4]),
        "ffn": random.choice([96, 144, 50, 51]),
        "experts": experts,
        "sequence": random.choice([64, 96, 100]),
        "gpus": gpus,
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "sp": random.choice([True, True, False]),
        "ep": random.choice([1, 2, 4, 8]) if experts else 1,
        "etp": random.choice([1, 1, 2]) if experts else tp,
        "vpp": vpp,
        "mbs": random.choice([1, 1, 2]),
        "gbs": random.choice([24, 48, 64]),
    }


def layout_of(row: dict[str, Any]) -> tuple[TransformerShape, Layout]:
    experts = Experts(number=row["experts"], per_token=1, ffn=row["ffn"]) if row["experts"] else None
    shape = TransformerShape(
        name="drawn",
        layers=row["layers"],
        hidden=row["hidden"],
        heads=row["heads"],
        kv_heads=row["kv_heads"],
        head_width=4,
        ffn=row["ffn"],
        gated=True,
        vocabulary=96,
        sequence_length=row["sequence"],
        experts=experts,
    )
    group = row["tp"] * row["cp"] * row["pp"]
    layout = Layout(
        tensor=row["tp"],
        context=row["cp"],
        expert=row["ep"],
        expert_tensor=row["etp"] if experts else 1,
        pipeline=row["pp"],
        data=0 if row["gpus"] % group else row["gpus"] // group,
        virtual_stages=row["vpp"] or 1,
        micro_batch_size=row["mbs"],
        global_batch_size=row["gbs"],
        sequence_parallel=row["sp"] and row["tp"] > 1,
    )
    return shape, layout


@pytest.fixture(scope="module")
def judged(pytestconfig: pytest.Config) -> list[tuple[dict[str, Any], list[Broken], dict[str, str]]]:
    """Rows, what is broken here, and what Megatron's own code refuses."""
    random = Random("legality")
    rows, here = [], []
    while len(rows) < ROWS:
        row = drawn(random)
        shape, layout = layout_of(row)
        cut = layers_of_stages(shape.layers, layout)
        row["ends"] = cut is not None and len(set(cut)) > 1
        row["sp"] = layout.sequence_parallel
        rows.append(row)
        here.append([one for one in broken(shape, layout, row["gpus"]) if one.moment != "never"])
    refusals = under(RELEASE, "legality_referee.py", {"cases": rows}, pytestconfig.getoption("tier"))
    return list(zip(rows, here, refusals, strict=True))


def test_the_same_is_refused_for_the_same_reasons(
    judged: list[tuple[dict[str, Any], list[Broken], dict[str, str]]],
) -> None:
    verdicts: Counter[str] = Counter()
    for row, here, refusals in judged:
        rules = {one.rule for one in here}
        ending = next((name for name in FIRST if name in refusals), None)
        if ending is not None:
            assert rules & FIRST[ending], (row, refusals)
        else:
            assert rules == set(refusals), (row, refusals)
        verdicts.update([ending] if ending else list(refusals) or ["ok"])
    assert {"ok", "layers", "batch", "feed_forward", "expert_width", "sequence_parallel"} <= verdicts.keys()
    assert min(verdicts.values()) >= 3, verdicts


def test_what_is_found_late_is_said_to_be(judged: list[tuple[dict[str, Any], list[Broken], dict[str, str]]]) -> None:
    """Configuration, groups and batch pass where every broken rule is one of building or of a step."""
    late = Counter[str]()
    for row, here, refusals in judged:
        if here and all(one.moment in ("model", "step") for one in here):
            assert not {"configuration", "groups", "batch", "experts"} & refusals.keys(), (row, refusals)
            assert all("checks at the start let it pass" in one.sentence for one in here)
            late.update(one.rule for one in here)
    assert {"layers", "feed_forward", "sequence_parallel", "expert_sequence_parallel"} <= late.keys(), late
