"""Programs: what one rank runs, the words for it, and their compact text. Standard library only.

Rows and instruction lists are written as compact text (`notation`), whose tokens are::

    token := [STAGE] KIND FIRST [":" END]               a row: F B I W R, as in "2F0", or "F0" on the home stage
    token := STAGE KIND FIRST [":" END] ["@" CHANNEL]   instructions: any of WORDS, as in "2RECV_F0@1"

Tokens are matched whole: PyTorch reads ``1FOO3`` as ``1F`` and ``2BANANA`` as ``2B`` (`_Action.from_str`), here they
are errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from penstock.schemas.errors import Fault, InvalidDocument
from penstock.schemas.notation import MAX_OPERATIONS, NUMBER, SPAN, Printer, fault, parse_codes

T = TypeVar("T")

KINDS = ("F", "B", "I", "W", "R")
"""Operations: forward, backward, its input half, its weight half, recomputation."""

FORWARD, BACKWARD, INPUT, WEIGHT, RECOMPUTE = range(5)

Transport = Literal["gloo", "nccl"]
"""Transports that programs can be lowered for. Every program also runs over gloo, which matches messages by tags."""

TRANSPORTS: tuple[Transport, ...] = get_args(Transport)

CODECS = ("fp16s",)
"""Encodings of fp32 tensors on a channel: two bytes per number, with a scaler that is a power of two (WPipe)."""

Sharding = Literal["gradients", "parameters", "parameters_kept"]
"""Sharding beyond the optimizer's states: ZeRO-2, ZeRO-3, and ZeRO-3 whose parameters are gathered once a step."""

SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)

WITHIN_PASSES: tuple[Sharding, ...] = ("gradients", "parameters")
"""Shardings whose collectives lie inside F and B; for each micro-batch, so that one stage has to hold the model."""

LOOK_AHEAD = 2
"""A receive is posted at most so many operations before the one that waits for it (decision 6)."""

CODEC_HEADER_BYTES = 5
"""Bytes that the codec adds to each tensor: the scaler's exponent and a flag."""

Operation = tuple[int, int, int]
"""Kind (index in ``KINDS``), stage number, micro-batch."""

WORDS = (
    *KINDS,
    "SEND_F",
    "RECV_F",
    "SEND_B",
    "RECV_B",
    "LOCAL_F",
    "LOCAL_B",
    "REDUCE",
    "WAIT_REDUCE",
    "STEP",
    "LOAD",
    "FREE",
    "VERSION",
    "NORM",
    "WAIT_NORM",
    "REDUCE_SHARED",
    "AVG_PUSH",
    "AVG_PULL",
    "REDUCE_PARTS",
    "UNSHARD",
    "RESHARD",
)
"""Kinds of instructions; see ``Instruction``."""

ROW_PERIOD, PROGRAM_PERIOD = 64, 1024
_ROW_TOKEN = re.compile(f"({NUMBER})?([FBIWR])({NUMBER})(?::({NUMBER}))?")
_RANKS_TOKEN = re.compile(f"({NUMBER})(?::({NUMBER}))?")
_PROGRAM_TOKEN = re.compile(f"({NUMBER})({'|'.join(WORDS)})({NUMBER})(?::({NUMBER}))?(?:@({NUMBER}))?")


class Instruction(NamedTuple):
    """One step of a rank.

    | kind | meaning |
    |---|---|
    | F B I W | compute a micro-batch; waits for the receives posted for it |
    | R | run the recomputed layers of a micro-batch again, ahead of its backward |
    | RECV_F RECV_B | post a receive over ``channel``; does not wait |
    | SEND_F SEND_B | send what F, or B or I, just made, over ``channel``; does not wait |
    | LOCAL_F LOCAL_B | hand it to another stage of this rank: from end ``channel`` to end ``channel + 1`` |
    | REDUCE | start bucket k's all-reduce: as the backward that follows readies it, at once if none follows |
    | WAIT_REDUCE | wait for bucket k |
    | REDUCE_SHARED | sum the gradient of tie k of the program over its group, and wait for it |
    | REDUCE_PARTS | sum the gradients of which each rank of the tensor group has a part, and wait for it |
    | NORM | start summing the squared gradients, and the overflow flag, over all ranks; each parameter once |
    | WAIT_NORM | wait for that |
    | UNSHARD | gather the parameters of bucket k over its groups, and wait for them |
    | RESHARD | keep this rank's rows of the parameters of bucket k, and let go of the others |
    | STEP | the optimizer's step over the gradients since the last one, for the layers of the stage's buckets |
    | VERSION | forwards of the stage from here on use the weights d updates older than the newest |
    | AVG_PULL | have bucket k's reference model at hand (elastic averaging; ALGORITHMS A.6) |
    | AVG_PUSH | start sending bucket k's update Δ to the reference model |

    For the buckets' and the ties' instructions ``micro_batch`` is k, for VERSION it is d, for STEP, NORM, WAIT_NORM
    and REDUCE_PARTS it is 0. LOAD (the batch's inputs) and FREE (let go of a micro-batch) are for programs written by
    hand.

    Without VERSION a forward uses the newest weights; a backward always uses its forward's weights. All versions are
    equal before the first update ever; a program's first forwards find the versions that the program before it left.
    NORM stands at the lowest stage of a rank, after its WAIT_REDUCEs, REDUCE_SHAREDs and REDUCE_PARTS and ahead of its
    STEPs.
    """

    kind: str
    stage: int
    micro_batch: int
    channel: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}" + (f"@{self.channel}" if self.channel >= 0 else "")


UNSHIFTED = frozenset(
    (
        *("REDUCE", "WAIT_REDUCE", "REDUCE_SHARED", "REDUCE_PARTS"),
        *("UNSHARD", "RESHARD"),
        *("NORM", "WAIT_NORM", "STEP", "VERSION", "AVG_PUSH", "AVG_PULL"),
    )
)
"""Words whose number is no micro-batch, so that the repetitions of a loop do not change it."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One end of what two replicas of neighbouring stages exchange in one direction.

    ``kind`` F or B; ``stage`` is this end's, ``peer_stage`` and ``peer`` (rank) the other's. ``rows[c]`` = [low, high)
    of this rank's slice of a micro-batch of row class c; (0, 0): nothing is exchanged in that class. Tensor t of the T
    that cross the cut travels for micro-batch m under the tag ``tag + m × T + t``. ``codec`` None: as it is.
    """

    kind: Literal["F", "B"]
    stage: int
    peer_stage: int
    peer: int
    rows: tuple[tuple[int, int], ...]
    tag: int
    codec: str | None = None


@dataclass(frozen=True, slots=True)
class RankStage:
    """A stage that a rank holds: layers ``first`` to ``last``, as replica ``replica`` of the replicas on ``ranks``.

    ``rows[c]`` = [low, high) of a micro-batch of row class c that this replica computes (round robin: all rows of the
    micro-batches whose number is ``replica`` modulo the replicas). ``previous``, ``next``:
    stage numbers in the same pipeline. ``micro_batches``: the pipeline's first and last place in every global batch.

    ``buckets``: layers [first, last] whose gradients are reduced, or averaged, together, and the number of their group
    in ``Program.groups`` (-1: nobody else holds them), last layers first. The buckets of all stages of a rank cover
    each of its layers once: a layer that several of them hold (in different pipelines) is one module, and stands in
    the buckets of the lowest. The last gradient of a bucket comes from the last backward of *all* stages that hold it.

    ``update_every``: micro-batches of the stage per STEP. ``versions``: the weights that are alive at once, at most.

    ``expert_groups``: for each bucket the number of the group that sums the gradients of its routed experts (-1: no
    other rank holds them); empty where ranks hold whole layers.

    ``modules``: the modules that each layer recomputes by themselves, within its backward.
    """

    stage: int
    first: int
    last: int
    replica: int
    ranks: tuple[int, ...]
    dispatch: Literal["rows", "round_robin"]
    rows: tuple[tuple[int, int], ...]
    recompute: tuple[tuple[int, int], ...]
    previous: int | None
    next: int | None
    micro_batches: tuple[int, int]
    buckets: tuple[tuple[int, int, int], ...]
    update_every: int
    versions: int = 1
    pipeline: int = 0
    expert_groups: tuple[int, ...] = ()
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks that hold a replica of a stage together (a GPU group), and this rank's part in it.

    ``tensor``, ``context``, ``expert``, ``expert_tensor``: how many ranks share a layer's tensors, its sequence, its
    experts, the tensors of an expert. ``lane``: this rank's number in its group, tensor fastest, then context; a group
    of more than tensor × context ranks has several meshes, which run separate samples. ``…_group``: the numbers in
    ``Program.groups`` of the groups that this rank is in (-1: alone).
    """

    tensor: int
    context: int
    expert: int
    expert_tensor: int
    lane: int
    tensor_group: int = -1
    context_group: int = -1
    expert_group: int = -1

    @property
    def size(self) -> int:
        """Return the number of ranks in a GPU group."""
        return max(self.tensor * self.context, self.expert * self.expert_tensor)

    @property
    def meshes(self) -> int:
        """Return the number of meshes in a GPU group."""
        return self.size // (self.tensor * self.context)

    @property
    def tensor_rank(self) -> int:
        """The rank's number among the ranks that share a layer's tensors."""
        return self.lane % self.tensor

    @property
    def context_rank(self) -> int:
        """The rank's number among the ranks that share a sequence."""
        return self.lane // self.tensor % self.context

    @property
    def expert_rank(self) -> int:
        """The rank's number among the ranks that share the experts."""
        return self.lane % (self.expert * self.expert_tensor)


@dataclass(frozen=True, slots=True)
class Shared:
    """A parameter that ``layers`` of several stages have in common; ``group``: number of the group that sums it."""

    name: str
    layers: tuple[int, ...]
    group: int


@dataclass(frozen=True, slots=True)
class Needs:
    """The device that a plan assumes for a rank: its kind, and the most bytes that training takes of it.

    The bytes are the prediction's peak without the device's context. Where ranks share a device in the plan, they are
    the peak of all these ranks together.
    """

    kind: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's part of ``batches`` global batches: ``prologue``, ``repeat`` times ``body``, ``epilogue``.

    It ends flushed. Micro-batches count through the global batches: number m is of global batch
    m // ``num_micro_batches``, at place m % ``num_micro_batches``. In repetition i of the body, micro-batch numbers are
    i × ``body_batches`` × ``num_micro_batches`` higher than written (the numbers in ``UNSHIFTED`` words stay).
    ``row_classes``: (rows, number of micro-batches), larger first; places are numbered through the classes.

    ``groups``: ranks of each process group of the run, by number, the same in all programs; no two stages or layer
    intervals share one, so that their reductions need not wait for each other. ``shared``: parameters tied across
    stages, which are in no bucket. ``shard_states``: optimizer states are shared out over a stage's replicas.

    ``pipelines``: how many the plan has. Under elastic averaging a rank is one pipeline's share of a device, pipeline
    p trains global batch i × ``pipelines`` + p of iteration i, α is 1 / ``pipelines``, and ``staleness`` is how many
    iterations old the reference model may be beyond the last (AvgPipe, section 3).

    ``transports``: transports for which the order of messages and reductions was checked at lowering (decision 38).
    A rank sends over one of them and no other. JSON has the field only where it says more than gloo.

    ``sharding``: what the ranks of buckets' groups share out, by rows of each parameter (decision 49): gradients too,
    parameters too, which every forward and every backward gathers layer by layer, or parameters that are gathered once
    a step (UNSHARD). Of the first two a rank's program has no words: their collectives lie inside F and B. None, and
    not in JSON, where ranks share out nothing or the optimizer's states alone (``shard_states``).

    ``mesh``: how ranks share layers; None where each holds whole ones, and then JSON does not have it. ``needs``: what
    the plan takes the device to be; None, and not in JSON, where no plan says it.
    """

    rank: int
    world_size: int
    device: str
    global_batch_size: int
    num_micro_batches: int
    row_classes: tuple[tuple[int, int], ...]
    stages: tuple[RankStage, ...]
    channels: tuple[Channel, ...]
    prologue: tuple[Instruction, ...]
    body: tuple[Instruction, ...] = ()
    repeat: int = 0
    epilogue: tuple[Instruction, ...] = ()
    update_rule: str = "synchronous"
    batches: int = 1
    body_batches: int = 0
    groups: tuple[tuple[int, ...], ...] = ()
    shared: tuple[Shared, ...] = ()
    pipelines: int = 1
    shard_states: bool = False
    staleness: int = 0
    transports: tuple[Transport, ...] = ("gloo",)
    mesh: Mesh | None = None
    needs: Needs | None = None
    sharding: Sharding | None = None

    def instructions(self) -> Iterator[Instruction]:
        """Yield all instructions of a run of the program, with the loop unrolled."""
        yield from self.prologue
        for i in range(self.repeat):
            yield from self.repetition(i)
        yield from self.epilogue

    def repetition(self, i: int) -> Iterator[Instruction]:
        """Yield the body as repetition ``i`` runs it."""
        ahead = i * self.body_batches * self.num_micro_batches
        for one in self.body:
            yield one if one.kind in UNSHIFTED else one._replace(micro_batch=one.micro_batch + ahead)

    def stage(self, number: int) -> RankStage:
        """Return the stage with this number that the rank holds. Raises KeyError where the rank does not hold it."""
        for stage in self.stages:
            if stage.stage == number:
                return stage
        raise KeyError(number)

    def row_class(self, micro_batch: int) -> int:
        """Return the row class of a micro-batch."""
        classes = self.row_classes
        return int(len(classes) > 1 and micro_batch % self.num_micro_batches >= classes[0][1])

    def size_of(self, micro_batch: int) -> int:
        """Return the number of rows of a whole micro-batch."""
        return self.row_classes[self.row_class(micro_batch)][0]

    def to_json(self, texts: Texts | None = None) -> dict[str, Any]:
        """Return plain data for JSON, with instructions and ranks as compact text that programs share in ``texts``."""
        shared_texts = texts or Texts()
        data = {name: getattr(self, name) for name in _PROGRAM_FIELDS}
        data["row_classes"] = [list(pair) for pair in self.row_classes]
        data["stages"] = [self._plain_stage(stage, shared_texts) for stage in self.stages]
        data["channels"] = [_plain(channel) for channel in self.channels]
        data["shared"] = [_plain(tie) for tie in self.shared]
        data["groups"] = shared_texts.of(self.groups, _print_groups)
        for part in _PARTS:
            data[part] = shared_texts.of(getattr(self, part), print_instructions)
        if self.transports == _GLOO:
            del data["transports"]
        else:
            data["transports"] = list(self.transports)
        if self.mesh is None:
            del data["mesh"]
        else:
            data["mesh"] = _plain(self.mesh)
        if self.needs is None:
            del data["needs"]
        else:
            data["needs"] = _plain(self.needs)
        if self.sharding is None:
            del data["sharding"]
        return data

    @staticmethod
    def _plain_stage(stage: RankStage, texts: Texts) -> dict[str, Any]:
        data = _plain(stage) | {"ranks": texts.of(stage.ranks, print_ranks)}
        if not stage.expert_groups:
            del data["expert_groups"]
        if not stage.modules:
            del data["modules"]
        return data

    @classmethod
    def from_json(cls, data: Any) -> Program:
        """Build the program that ``to_json`` wrote. Raises InvalidDocument naming the place of the first fault."""
        if isinstance(data, dict):
            data = {"transports": _GLOO, "mesh": None, "needs": None, "sharding": None} | data
        values = _read(data, "", _PROGRAM_FIELDS)
        values["stages"] = tuple(_stage(one, f"/stages/{i}") for i, one in enumerate(values["stages"]))
        values["channels"] = tuple(
            Channel(**_read(one, f"/channels/{i}", _CHANNEL_FIELDS)) for i, one in enumerate(values["channels"])
        )
        values["shared"] = tuple(
            Shared(**_read(one, f"/shared/{i}", _SHARED_FIELDS)) for i, one in enumerate(values["shared"])
        )
        for part in _PARTS:
            values[part] = tuple(parse_instructions(values[part]))
        values["groups"] = tuple(map(parse_ranks, values["groups"]))
        if values["mesh"] is not None:
            values["mesh"] = Mesh(**_read(values["mesh"], "/mesh", _MESH_FIELDS))
        if values["needs"] is not None:
            values["needs"] = Needs(**_read(values["needs"], "/needs", _NEEDS_FIELDS))
        return cls(**values)


class Texts:
    """Compact texts of what programs have in common, each made once: a stage's replicas mostly run the same."""

    def __init__(self) -> None:
        self._written: dict[tuple[int, object], tuple[object, Any]] = {}

    def of(self, value: T, write: Callable[[T], Any]) -> Any:
        """Return the result of ``write`` for a value: the same object for the same value."""
        key = id(value), write
        if key not in self._written:
            self._written[key] = value, write(value)  # kept with the value, whose id stays its own
        return self._written[key][1]


def print_ranks(ranks: Sequence[int]) -> str:
    """Format ranks in their order as compact text: ``0:16 20`` stands for 0 to 15 and 20."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([rank, rank + 1])
    return " ".join(f"{first}:{end}" if end > first + 1 else str(first) for first, end in runs)


def _print_groups(groups: Sequence[Sequence[int]]) -> list[str]:
    return list(map(print_ranks, groups))


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse ranks in their order.

    Raises InvalidDocument, with the position, for text that ``print_ranks`` cannot write.
    """
    ranks: list[int] = []
    for token in re.finditer(r"[^ ]+", text):
        match = _RANKS_TOKEN.fullmatch(token[0])
        first, end = (int(match[1]), int(match[2] or int(match[1]) + 1)) if match else (0, 0)
        if not first < end:
            raise fault(text, token.start(), f"{token[0]!r} is not a rank or a range of ranks, such as 3 or 0:16")
        if len(ranks) + end - first > MAX_OPERATIONS:
            raise fault(text, token.start(), f"the text names more than {MAX_OPERATIONS} ranks")
        ranks.extend(range(first, end))
    return tuple(ranks)


def print_row(operations: Sequence[Operation], home: int | None = None) -> str:
    """Format operations in order as compact text; operations of stage ``home`` are printed without their stage."""
    kinds = len(KINDS)
    codes = [(stage * kinds + kind) * SPAN + m for kind, stage, m in operations]

    def word(key: int) -> tuple[str, str]:
        stage, kind = divmod(key, kinds)
        return (KINDS[kind] if stage == home else f"{stage}{KINDS[kind]}"), ""

    return Printer(codes, word, ROW_PERIOD).text(0, len(codes))


def parse_row(text: str, home: int | None = None) -> list[Operation]:
    """Parse operations in order; operations without a stage belong to stage ``home``.

    Raises InvalidDocument, with the position, when the text is not of the grammar, names no stage and there is no
    ``home``, has a micro-batch below 0 or above 2^31 - 1, or unrolls to more than ``MAX_OPERATIONS``.
    """
    kinds = len(KINDS)

    def key(match: re.Match[str]) -> int:
        stage = match[1]
        number = home if stage is None else int(stage)
        if number is None:
            raise fault(text, match.start(), f"{match[0]!r} names no stage; expected one in front, such as 0{match[0]}")
        return number * kinds + KINDS.index(match[2])

    expected = "expected F, B, I, W or R with a micro-batch, such as F0, 2F0 or F0:8"
    codes = parse_codes(text, _ROW_TOKEN, key, expected)
    split = [divmod(code, SPAN) for code in codes]
    return [(word % kinds, word // kinds, m) for word, m in split]


def print_instructions(instructions: Sequence[Instruction]) -> str:
    """Format instructions in order as compact text, such as ``2RECV_F0@1 2F0 2SEND_F0@2``."""
    numbers: dict[tuple[str, int, int], int] = {}
    codes = [numbers.setdefault((i[0], i[1], i[3]), len(numbers)) * SPAN + i[2] for i in instructions]
    words = list(numbers)

    def word(key: int) -> tuple[str, str]:
        kind, stage, channel = words[key]
        return f"{stage}{kind}", f"@{channel}" if channel >= 0 else ""

    return Printer(codes, word, PROGRAM_PERIOD).text(0, len(codes))


def parse_instructions(text: str) -> list[Instruction]:
    """Parse instructions in order. Raises InvalidDocument as ``parse_row`` does."""
    numbers: dict[tuple[str, int, int], int] = {}

    def key(match: re.Match[str]) -> int:
        word = (match[2], int(match[1]), -1 if match[5] is None else int(match[5]))
        return numbers.setdefault(word, len(numbers))

    expected = "expected a stage, a word and a micro-batch, such as 2F0, 2RECV_F0@1 or 2F0:8"
    codes = parse_codes(text, _PROGRAM_TOKEN, key, expected)
    words = list(numbers)
    split = [divmod(code, SPAN) for code in codes]
    return [Instruction(words[k][0], words[k][1], m, words[k][2]) for k, m in split]


_PARTS = ("prologue", "body", "epilogue")
_GLOO: tuple[Transport, ...] = ("gloo",)
Check = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _is_list(value: Any, check: Check = lambda _: True, length: int | None = None) -> bool:
    return isinstance(value, list | tuple) and length in (None, len(value)) and all(map(check, value))


def _is_counts(value: Any) -> bool:
    return _is_list(value, _is_count)


def _is_pair(value: Any) -> bool:
    return _is_list(value, _is_count, 2)


def _is_pairs(value: Any) -> bool:
    return _is_list(value, _is_pair)


def _is_bucket(value: Any) -> bool:
    return _is_list(value, length=3) and _is_pair(value[:2]) and _is_group(value[2])


def _is_group(value: Any) -> bool:
    return value == -1 or _is_count(value)


def _is_stage(value: Any) -> bool:
    return value is None or _is_count(value)


_NUMBERS = (
    *("rank", "world_size", "global_batch_size", "num_micro_batches", "repeat"),
    *("batches", "body_batches", "pipelines", "staleness"),
)
_PROGRAM_FIELDS: dict[str, Check] = {
    **dict.fromkeys(_NUMBERS, _is_count),
    **dict.fromkeys(("device", *_PARTS, "update_rule"), _is_text),
    **dict.fromkeys(("stages", "channels", "shared"), _is_list),
    "row_classes": _is_pairs,
    "groups": lambda value: _is_list(value, _is_text),
    "shard_states": lambda value: isinstance(value, bool),
    "transports": lambda value: _is_list(value) and tuple(value) in (_GLOO, TRANSPORTS),
    "mesh": lambda _: True,
    "needs": lambda _: True,
    "sharding": lambda value: value is None or value in SHARDINGS,
}
_HELD_FIELDS: dict[str, Check] = {
    **dict.fromkeys(("stage", "first", "last", "replica", "update_every", "versions", "pipeline"), _is_count),
    **dict.fromkeys(("rows", "recompute"), _is_pairs),
    **dict.fromkeys(("previous", "next"), _is_stage),
    "ranks": _is_text,
    "dispatch": ("rows", "round_robin").__contains__,
    "micro_batches": _is_pair,
    "buckets": lambda value: _is_list(value, _is_bucket),
    "expert_groups": lambda value: _is_list(value, _is_group),
    "modules": lambda value: _is_list(value, _is_text),
}
_MESH_FIELDS: dict[str, Check] = {
    **dict.fromkeys(("tensor", "context", "expert", "expert_tensor"), lambda value: _is_count(value) and value > 0),
    "lane": _is_count,
    **dict.fromkeys(("tensor_group", "context_group", "expert_group"), _is_group),
}
_NEEDS_FIELDS: dict[str, Check] = {"kind": _is_text, "memory_bytes": _is_count}
_PARTLY_READ = ("stages", "channels", "shared", "mesh", "needs")
_SHARED_FIELDS: dict[str, Check] = {"name": _is_text, "layers": _is_counts, "group": _is_count}
_CHANNEL_FIELDS: dict[str, Check] = {
    **dict.fromkeys(("stage", "peer_stage", "peer", "tag"), _is_count),
    "kind": ("F", "B").__contains__,
    "rows": _is_pairs,
    "codec": lambda value: value is None or _is_text(value),
}


def _as_lists(value: Any) -> Any:
    return [_as_lists(one) for one in value] if isinstance(value, tuple) else value


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(one) for one in value) if isinstance(value, list | tuple) else value


def _plain(part: RankStage | Channel | Shared | Mesh | Needs) -> dict[str, Any]:
    return {field.name: _as_lists(getattr(part, field.name)) for field in fields(part)}


def _stage(data: Any, pointer: str) -> RankStage:
    if isinstance(data, dict):
        data = {"expert_groups": (), "modules": ()} | data
    values = _read(data, pointer, _HELD_FIELDS)
    return RankStage(**values | {"ranks": parse_ranks(values["ranks"])})


def _read(data: Any, pointer: str, checks: dict[str, Check]) -> dict[str, Any]:
    """Return the fields of one object, with lists as tuples; refuse fields other than the ones in ``checks``."""
    if not isinstance(data, dict):
        raise InvalidDocument(f"program{pointer} is {type(data).__name__}, not an object")
    faults = [Fault(f"{pointer}/{name}", "is not a field here", "unknown") for name in data if name not in checks]
    for name, check in checks.items():
        if name not in data:
            faults.append(Fault(f"{pointer}/{name}", "is missing", "missing"))
        elif not check(data[name]):
            faults.append(Fault(f"{pointer}/{name}", f"has the invalid value {data[name]!r:.80}"))
    if faults:
        raise InvalidDocument("the program is not valid", faults=tuple(faults))
    return {name: data[name] if name in _PARTLY_READ else _as_tuples(data[name]) for name in checks}
