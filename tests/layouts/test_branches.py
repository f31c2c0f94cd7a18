"""Branches of scripts are followed where their conditions are known, asked about where they are not."""

from __future__ import annotations

import subprocess
from random import Random

import pytest
from test_trainers import imported, stages_of

from penstock.layouts.files.shell import Unsaid, Value, Variables
from penstock.schemas.bounded.budget import Budget
from penstock.schemas.errors import InvalidDocument

pytestmark = pytest.mark.tier("ci")

PP = "--pipeline-model-parallel-size"
IF = """if [ "$SIZE" = "8b" ]; then
    PP=2
elif [[ $SIZE == 70* ]]; then
    PP=4
else
    PP=8
fi
"""
CASE = """case $SIZE in
    8b|9b)
        PP=2
        ;;
    70*) PP=4 ;;
    *)
        PP=8
esac
"""


def value_of(text: str, overrides: dict[str, str] | None = None) -> str:
    return Variables(text, Budget("the script"), overrides or {}).value(Value("$PP", 10**6)).text


@pytest.mark.tier("quick")
@pytest.mark.parametrize("text", [IF, CASE], ids=["if", "case"])
@pytest.mark.parametrize(("size", "value"), [("8b", "2"), ("70b", "4"), ("1b", "8")])
def test_a_branch_is_followed(text: str, size: str, value: str) -> None:
    assert value_of(f"SIZE={size}\n{text}") == value
    assert value_of(text, {"SIZE": size}) == value
    with pytest.raises(Unsaid, match="line 1") as caught:
        value_of(text)
    assert caught.value.variable == "SIZE"


CONDITIONS = (
    '[ "$A" = "$B" ]', "[ $A -gt 2 ]", "[ $A -le $B ]", '[ -z "$E" ]', '[ -n "$E" ]', '[ ! "$A" != 3 ]',
    '[[ $A != "3*" ]]', "[[ $A == 3* ]]", "(( A * 2 > B + 1 ))", "(( A == B ))", '[ "$A" = 3 ] && [ "$B" = 3 ]',
    "[[ $A -eq 3 || $B -eq 3 ]]",
    '[ "$A" = 1 ] || [ "$B" = 3 ] && [ -z "$E" ]',
)  # fmt: skip


def scripts(random: Random, depth: int = 0) -> str:
    """Write assignments in nested branches."""
    margin = "  " * depth
    lines = [f"{margin}PP={random.randint(1, 99)}"] if random.random() < 0.8 or depth == 0 else [f"{margin}A=4"]
    for _ in range(random.randint(0, 2) if depth < 3 else 0):
        inner = [scripts(random, depth + 1) for _ in range(3)]
        one, other = random.choice(CONDITIONS), random.choice(CONDITIONS)
        if random.random() < 0.3:
            lines.append(f"{margin}case $A in 1|2)\n{inner[0]}\n;;\n{margin}3*)\n{inner[1]} ;;\n*) PP=7;; esac")
        elif random.random() < 0.5:
            lines.append(f"{margin}if {one}; then\n{inner[0]}\n{margin}fi")
        else:
            lines.append(f"{margin}if {one}\nthen\n{inner[0]}\n{margin}elif {other}; then\n{inner[1]}")
            lines.append(f"{margin}else\n{inner[2]}\n{margin}fi")
    return "\n".join(lines)


def test_a_shell_comes_to_the_same_value() -> None:
    random = Random("branches")
    texts = []
    for _ in range(150):
        a, b = random.choice([1, 2, 3, 3, 31]), random.choice([1, 3, 5])
        texts.append(f"A={a}\nB={b}\nE={random.choice(['', 'x'])}\n{scripts(random)}\n")
    whole = "".join(f"(\n{text}echo $PP\n)\n" for text in texts)
    done = subprocess.run(["bash", "-eu"], input=whole, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [value_of(text) for text in texts]


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("PP=1\nfor i in 1 2; do\n  PP=$i\ndone\n", "1 in line 1 and .* in line 3"),
        ("if [ -f x ]; then PP=1; else PP=2; fi\n", r"by \[ -f x \], line 1"),
        ("if grep -q x y; then\n PP=1\nelse\n PP=2\nfi\n", "by grep -q x y, line 1"),
        ("if [ $A = 1 ]; then\n PP=1\nelse\n PP=2\n", "1 in line 2 and 2 in line 4"),  # it is not closed
        ("A=x\nif (( A > 1 )); then PP=1; else PP=2; fi\n", "1 in line 2 and 2 in line 2"),
    ],
)
def test_what_is_not_known_is_not_guessed(text: str, words: str) -> None:
    with pytest.raises(Unsaid, match=words):
        value_of(text)


FLAGS = f"""if [ $SIZE = big ]; then
    ARGS="{PP} 4 --num-layers-per-virtual-pipeline-stage 1"
else
    ARGS="{PP} 2"
fi
"""


def test_flags_of_a_branch_that_does_not_run_do_not_count() -> None:
    assert stages_of(imported("megatron", f"SIZE=small\n{FLAGS}")) == [(0, 4), (5, 9)]
    assert len(stages_of(imported("megatron", f"SIZE=big\n{FLAGS}"))) == 8
    with pytest.raises(
        InvalidDocument, match=r"it is 4 \(line 2\) or 2 \(line 4\), chosen by \[ \$SIZE = big \], line 1"
    ) as caught:
        imported("megatron", FLAGS)
    assert "--given SIZE=…" in str(caught.value.remedy)
    result = imported("megatron", FLAGS, values={"SIZE": "small"})
    assert stages_of(result) == [(0, 4), (5, 9)]


def test_a_flag_under_a_condition_is_supposed_aloud() -> None:
    result = imported("megatron", f'ARGS="{PP} 2"\nif [ $DO ]; then\n  ARGS="$ARGS --use-distributed-optimizer"\nfi\n')
    assert result.request.memory.optimizer_sharding == "over_replicas"
    sentences = [each for each in result.assumptions if "as if a condition held" in each]
    assert sentences == [
        "judged as if a condition held that is not known, by [ $DO ], line 2: --use-distributed-optimizer"
    ]
