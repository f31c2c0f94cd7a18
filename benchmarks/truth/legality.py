"""Products of degrees with the verdict of Megatron-LM's own checks, against the rules here."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from penstock.schemas.transformers.shape import Experts, TransformerShape
from penstock.shapes.layout import Layout
from penstock.shapes.legality import broken

VERDICT_WORDS = {
    "total_model_size": "product",
    "Number of layers": "layers",
    "num_attention_heads": "heads",
    "num_query_groups": "key_value_heads",
    "seq-length": "context",
    "eval_global_batch_size": "batch",
    "Number of experts": "experts",
    "expert_tensor_model_pipeline": "expert_groups",
}
"""A dict from words of Megatron's verdict to the rule here that has to be among the broken ones."""


class Verdict(NamedTuple):
    """A product of degrees: Megatron's ``verdict``, and the rules broken here, by when Megatron checks them."""

    verdict: str
    at_start: tuple[str, ...]
    later: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """True if both accept, or both refuse for the same reason.

        The file's verdicts are given before building.
        """
        if self.verdict == "ok":
            return not self.at_start
        return any(words in self.verdict and rule in self.at_start for words, rule in VERDICT_WORDS.items())


def verdicts(path: Path) -> list[Verdict]:
    """Return every row of the file of verdicts."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [_verdict(json.loads(line)) for line in lines]


def _verdict(row: dict[str, Any]) -> Verdict:
    """Return the verdict of a row.

    The file has no vocabulary or width of a head, which no rule here needs; Megatron pads the vocabulary.
    """
    experts = None if row["experts"] is None else Experts(number=row["experts"], per_token=1, ffn=row["ffn"])
    shape = TransformerShape(
        name=row["model"],
        layers=row["layers"],
        hidden=row["hidden"],
        heads=row["heads"],
        kv_heads=row["kv_heads"],
        head_width=max(1, row["hidden"] // row["heads"]),
        ffn=row["ffn"],
        gated=True,
        vocabulary=row["hidden"],
        sequence_length=row["sequence"],
        experts=experts,
    )
    group = row["tp"] * row["cp"] * row["pp"]
    layout = Layout(
        tensor=row["tp"],
        context=row["cp"],
        expert=row["ep"],
        expert_tensor=1 if experts is None else row["etp"] or row["tp"],
        pipeline=row["pp"],
        data=0 if row["gpus"] % group else row["gpus"] // group,
        virtual_stages=row["vpp"] or 1,
        micro_batch_size=row["mbs"],
        global_batch_size=row["gbs"],
        sequence_parallel=row["sp"],
        ends_as_layers=False,
    )
    broken_rules = broken(shape, layout, row["gpus"])
    at_start = tuple(one.rule for one in broken_rules if one.moment == "start")
    return Verdict(row["result"], at_start, tuple(one.rule for one in broken_rules if one.moment != "start"))


def report(path: Path) -> int:
    """Print how many verdicts agree with Megatron-LM's; return how many do not."""
    if not path.exists():
        print(f"legality: no {path}")
        return 0
    wrong, results = 0, verdicts(path)
    print(f"legality: {sum(one.agrees for one in results)} of {len(results)} verdicts agree with Megatron-LM's")
    for one in results:
        if not one.agrees:
            wrong += 1
            print(f"  Megatron says {one.verdict}, here {', '.join(one.at_start) or 'no rule'}")
    late = Counter(one.later for one in results if one.verdict == "ok" and one.later)
    for rules, number in late.items():
        print(f"  {number} that its checks let pass are refused here too: {', '.join(rules)}")
    return wrong
