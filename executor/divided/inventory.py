"""A comparison of the collectives of a run with the predicted ones: kinds, ranks, bytes and order.

The prediction has two sources. A rank's program has the sums of its buckets, ties and parts of gradients. The layers,
as the profiler traces them on the meta device, have the collectives of each forward and backward. A dispatch mode
around the checked steps notes the collectives that run. Messages between stages are no collectives. Sums over all ranks
of the run (losses and the gradients' norm: a number each) belong to no group.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from penstock.executor.divided.crossing_tensors import TracedLayer, TracedParameter, sizes_of, traced_layers
from penstock.executor.divided.tensor_group import LocalMode
from penstock.executor.profiling.tracing import CollectiveKind, Sent
from penstock.executor.stage.reduction import are_even
from penstock.executor.stage.sharded_optimizer import shares_of
from penstock.schemas.program import WITHIN_PASSES, Instruction, Program, RankStage

if TYPE_CHECKING:
    from penstock.executor.divided.division import Division
    from penstock.executor.run.chain import Chain


class Expected(NamedTuple):
    """A predicted collective; one of the instructions ``first`` to ``last`` starts it."""

    first: int
    last: int
    sent: Sent


class Ran(NamedTuple):
    """A collective that instruction ``at`` started."""

    at: int
    sent: Sent


class Inventory(LocalMode):
    """A mode that notes the collectives of checked steps, and compares each step with the prediction at its end.

    ``ran``: the number of collectives by kind. ``difference``: the first collective that differs, None while all agree.
    """

    def __init__(
        self, program: Program, chain: Chain, division: Division | None, groups: Sequence[Any], mark: Sequence[int]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: Counter[CollectiveKind] = Counter()
        self.difference: str | None = None
        self._program, self._mark = program, mark
        self._numbers: dict[str, int] = {  # torch represents groups without this rank by a number
            group.group_name: number for number, group in enumerate(groups) if isinstance(group, dist.ProcessGroup)
        }
        self._expected = list(Prediction(program, chain, division, self._numbers).collectives())
        self._seen: list[Ran] = []

    def sends(self, sent: Sent) -> None:
        """Note a collective of one of the program's groups."""
        if sent.group in self._numbers:
            self._seen.append(Ran(self._mark[0], sent))

    def end_step(self, step: int) -> None:
        """Compare the collectives since the last step's end."""
        seen, self._seen = self._seen, []
        self.ran.update(each.sent.operation for each in seen)
        if self.difference is None:
            wrong = first_difference(self._expected, seen)
            if wrong is not None:
                self.difference = f"rank {self._program.rank}, step {step}, " + self._words(*wrong)

    def _words(self, expected: Expected | None, ran: Ran | None) -> str:
        at = ran or expected
        assert at is not None
        index = ran.at if ran is not None else expected.first if expected is not None else 0
        instruction = list(self._program.instructions())[index]
        ranks = ", ".join(map(str, self._program.groups[self._numbers[at.sent.group]]))
        predicted = "nothing was predicted" if expected is None else f"predicted {self._expected_words(expected, ran)}"
        did = "nothing ran" if ran is None else f"ran {_sent_words(ran.sent)}"
        return f"instruction {index} ({instruction}), over ranks {ranks}: {predicted}, {did}"

    def _expected_words(self, expected: Expected, ran: Ran | None) -> str:
        """Describe a predicted collective, with its instructions if only these differ."""
        words = _sent_words(expected.sent)
        if ran is None or ran.sent != expected.sent:
            return words
        instructions = list(self._program.instructions())
        return f"{words} between {instructions[expected.first]} and {instructions[expected.last]}"


def _sent_words(sent: Sent) -> str:
    return f"{sent.operation.replace('_', '-')} of {sent.bytes} bytes"


def first_difference(expected: Iterable[Expected], ran: Iterable[Ran]) -> tuple[Expected | None, Ran | None] | None:
    """Return the earliest pair that differs, compared group by group in order; None where all ran as predicted."""
    planned: dict[str, list[Expected]] = defaultdict(list)
    seen: dict[str, list[Ran]] = defaultdict(list)
    for each in expected:
        planned[each.sent.group].append(each)
    for one in ran:
        seen[one.sent.group].append(one)
    wrong_pairs = []
    for group in planned.keys() | seen.keys():
        pairs = zip_longest(planned[group], seen[group])
        wrong = next((pair for pair in pairs if not _agree(*pair)), None)
        if wrong is not None:
            wrong_pairs.append(wrong)
    return min(wrong_pairs, key=_place, default=None)


def _agree(expected: Expected | None, ran: Ran | None) -> bool:
    if expected is None or ran is None:
        return False
    same = expected.sent == ran.sent
    if ran.sent.operation == "all_to_all":  # its bytes depend on the tokens
        same = expected.sent[:2] == ran.sent[:2]
    return same and expected.first <= ran.at <= expected.last


def _place(pair: tuple[Expected | None, Ran | None]) -> int:
    expected, ran = pair
    return min(each for each in (expected and expected.first, ran and ran.at) if each is not None)


class _Unit(NamedTuple):
    """Parameters whose rows ranks share out, in one collective over ``group``; ``layers`` hold them."""

    group: str
    bytes: int
    layers: tuple[int, ...]


class Prediction:
    """The collectives that one step of a program starts, from its instructions and from traces of its layers."""

    def __init__(self, program: Program, chain: Chain, division: Division | None, numbers: Mapping[str, int]) -> None:
        self._program = program
        self._instructions = list(program.instructions())
        self._names = {number: name for name, number in numbers.items()}
        self._layers: dict[tuple[str, ...], Mapping[int, Sequence[TracedLayer]]] = {
            modules: traced_layers(chain, division, sizes_of(program), modules)
            for modules in dict.fromkeys(entry.modules for entry in program.stages)
        }
        self._tied = {tie.name: tie for tie in chain.ties}
        self._split = {one.stage for one in self._instructions if one.kind == "W"}

    def collectives(self) -> Iterator[Expected]:
        """Yield the collectives by the first instruction that may start them; collectives of a group in their order."""
        again: set[tuple[int, int]] = set()
        for index, one in enumerate(self._instructions):
            entry = self._program.stage(one.stage)
            if one.kind in ("F", "B", "I", "R", "W"):
                yield from (Expected(index, index, each) for each in self._within(one, entry, again))
            elif one.kind == "UNSHARD":
                yield from (Expected(index, index, each) for each in self._moved("all_gather", entry, one.micro_batch))
            elif one.kind == "REDUCE":
                yield from self._bucket(index, one, entry)
            elif one.kind == "STEP":
                yield from self._gathered(index, entry)
            elif one.kind == "REDUCE_SHARED":
                tie = self._program.shared[one.micro_batch]
                (layer, name), *_ = self._tied[tie.name].places
                size = self._sizes()[layer].parameters[name].bytes
                yield Expected(index, index, Sent("all_reduce", self._names[tie.group], size))
            elif one.kind == "REDUCE_PARTS":
                yield from self._parts(index, entry)

    def _sizes(self) -> Sequence[TracedLayer]:
        return next(iter(next(iter(self._layers.values())).values()))

    def _within(self, one: Instruction, entry: RankStage, again: set[tuple[int, int]]) -> Iterator[Sent]:
        """Yield the collectives of an operation's layers."""
        low, high = entry.rows[self._program.row_class(one.micro_batch)]
        layers = self._layers[entry.modules][high - low]
        inside = range(entry.first, entry.last + 1)
        key = one.stage, one.micro_batch
        if one.kind == "R":
            again.add(key)
        if self._program.sharding in WITHIN_PASSES:
            yield from self._layer_by_layer(one, entry, layers, again=key not in again)
        elif one.kind == "F":
            yield from (sent for i in inside for sent in layers[i].forward)
        elif one.kind == "R":
            yield from (sent for i in inside if _recomputed(entry, i) for sent in layers[i].forward)
        elif one.kind in ("B", "I"):
            for segment in _segments(entry, one.stage in self._split):
                if _recomputed(entry, segment[0]) and key not in again:
                    yield from (sent for i in segment for sent in layers[i].forward)
                now = one.kind == "B" or self._is_early(segment)
                yield from (sent for i in reversed(segment) if now or i for sent in layers[i].backward)
        elif entry.first == 0 and not self._is_early(list(_segments(entry, True))[-1]):
            yield from layers[0].backward  # the batch's inputs need no gradient: all of the backward is W

    def _layer_by_layer(
        self, one: Instruction, entry: RankStage, layers: Sequence[TracedLayer], *, again: bool
    ) -> Iterator[Sent]:
        """Yield an operation's collectives where each layer gathers parameters, or sums gradients, separately."""
        gathers = self._program.sharding == "parameters"

        def forward(some: Iterable[int]) -> Iterator[Sent]:
            for i in some:
                yield from self._of_layers("all_gather", entry, [i]) if gathers else ()
                yield from layers[i].forward

        if one.kind != "B":
            inside = range(entry.first, entry.last + 1)
            yield from forward(inside if one.kind == "F" else filter(partial(_recomputed, entry), inside))
            return
        segments = list(_segments(entry, True))
        before = [_recomputed(entry, segment[0]) and again for segment in segments[1:]]
        begun = False
        for segment, runs_next in zip(segments, [*before, True], strict=True):
            if _recomputed(entry, segment[0]) and again:
                yield from forward(segment)
                begun = False
            for i in reversed(segment):
                if gathers and not begun:
                    yield from self._of_layers("all_gather", entry, [i])
                begun = i > segment[0] or not runs_next
                if gathers and begun:
                    yield from self._of_layers("all_gather", entry, [i - 1])
                yield from layers[i].backward
                yield from self._of_layers("reduce_scatter", entry, [i])

    def _is_early(self, segment: range) -> bool:
        """Return whether the first layer shares a parameter with other layers of its segment; I then has its gradient.

        Parts of that gradient come from several layers, so no layer's W can compute it (``stage.split_backward``).
        """
        return any({0} < set(segment) & set(tie.layers) for tie in self._tied.values())

    def _summed(self, entry: RankStage, number: int) -> list[tuple[int, list[TracedParameter]]]:
        """Return a bucket's parameters by the group that sums them; shared-out experts are listed separately."""
        first, last, group = entry.buckets[number]
        expert_group = entry.expert_groups[number] if entry.expert_groups else -1
        shared = {tie.name for tie in self._program.shared}  # in no bucket; others are in their first layer's
        elsewhere = {
            place
            for tie in self._tied.values()
            for place in tie.places
            if tie.name in shared or place[0] != tie.layers[0]
        }
        named = [(i, name, each) for i in range(first, last + 1) for name, each in self._sizes()[i].parameters.items()]
        trained = [each for i, name, each in named if each.trained and (i, name) not in elsewhere]
        return [
            (over, [each for each in trained if each.is_expert == apart])
            for over, apart in ((group, False), (expert_group, True))
            if over >= 0
        ]

    def _flats(self, entry: RankStage) -> dict[int, list[tuple[int, bool, list[int]]]]:
        """Return for each reduced bucket its buffers, one per group and data type, with the bytes of each collective.

        Where ranks share out the optimizer's states, even shares (True) are sent together, others one by one.
        """
        loads: dict[int, list[int]] = {}
        buffers: dict[int, list[tuple[int, bool, list[int]]]] = {}
        for number, _ in enumerate(entry.buckets):
            buffers[number] = flats = []
            for group, parameters in self._summed(entry, number):
                ranks = self._program.groups[group]
                shares = [parameters]
                if self._program.shard_states:
                    sizes = {id(each): each.whole_bytes for each in parameters}
                    shares = shares_of(parameters, loads.setdefault(group, [0] * len(ranks)), sizes)
                for dtype in dict.fromkeys(each.dtype for each in parameters):
                    sent = [sum(each.bytes for each in share if each.dtype == dtype) for share in shares]
                    even = are_even(sent)
                    flats.append((group, even, [max(sent) * len(sent)] if even else [size for size in sent if size]))
        return buffers

    def _units(self, entry: RankStage, number: int) -> list[_Unit]:
        """Return the units of a bucket whose rows ranks share out; each is gathered, and summed, by one collective."""
        inside: defaultdict[str, list[int]] = defaultdict(list)
        for i in range(entry.first, entry.last + 1):
            for each in self._sizes()[i].parameters.values():
                inside[each.key].append(i)
        within = self._program.sharding in WITHIN_PASSES
        units = []
        for group, parameters in self._summed(entry, number):
            ranks = len(self._program.groups[group])
            sizes: Counter[tuple[torch.dtype, tuple[int, ...]]] = Counter()
            for each in parameters:
                layers = tuple(inside[each.key])
                sizes[each.dtype, layers if within else ()] += each.padded_bytes(ranks)
            units += [_Unit(self._names[group], size, layers) for (_, layers), size in sizes.items()]
        return units

    def _moved(self, operation: CollectiveKind, entry: RankStage, number: int) -> Iterator[Sent]:
        yield from (Sent(operation, unit.group, unit.bytes) for unit in self._units(entry, number))

    def _of_layers(self, operation: CollectiveKind, entry: RankStage, layers: Iterable[int]) -> Iterator[Sent]:
        """Yield the collectives that gather or sum some layers, once for units that several of them hold."""
        order = sorted(range(len(entry.buckets)), key=lambda number: entry.buckets[number][0])
        units = [unit for number in order for unit in self._units(entry, number)]
        wanted = dict.fromkeys(k for i in layers for k, unit in enumerate(units) if i in unit.layers)
        yield from (Sent(operation, units[k].group, units[k].bytes) for k in wanted)

    def _own_rows(self, entry: RankStage, parameters: Iterable[TracedParameter]) -> list[TracedParameter]:
        """Return the parameters with the bytes of this rank's rows, where ranks share them out."""
        shared = {
            each.key: self._program.groups[group]
            for number in range(len(entry.buckets))
            for group, members in self._summed(entry, number)
            for each in members
        }
        local = []
        for each in parameters:
            ranks = shared.get(each.key, (self._program.rank,))
            local.append(each._replace(bytes=each.bytes_of(ranks.index(self._program.rank), len(ranks))))
        return local

    def _bucket(self, index: int, one: Instruction, entry: RankStage) -> Iterator[Expected]:
        """Yield a bucket's sums, which start when they are waited for at the latest; shared-out experts separately."""
        end = self._instructions.index(one._replace(kind="WAIT_REDUCE"), index)
        if self._program.sharding is not None:
            yield from (Expected(index, end, each) for each in self._moved("reduce_scatter", entry, one.micro_batch))
            return
        together: CollectiveKind = "reduce_scatter" if self._program.shard_states else "all_reduce"
        for group, even, sizes in self._flats(entry)[one.micro_batch]:
            for size in sizes:
                yield Expected(index, end, Sent(together if even else "reduce", self._names[group], size))

    def _gathered(self, index: int, entry: RankStage) -> Iterator[Expected]:
        """Yield the collectives that gather parameters which other ranks step."""
        if self._program.sharding == "gradients":
            inside = range(entry.first, entry.last + 1)
            yield from (Expected(index, index, each) for each in self._of_layers("all_gather", entry, inside))
        for flats in self._flats(entry).values() if self._program.shard_states else ():
            for group, even, sizes in flats:
                for size in sizes:
                    yield Expected(index, index, Sent("all_gather" if even else "broadcast", self._names[group], size))

    def _parts(self, index: int, entry: RankStage) -> Iterator[Expected]:
        """Yield the sums of gradients of which each rank has a part."""
        mesh = self._program.mesh
        assert mesh is not None
        inside = range(entry.first, entry.last + 1)
        parts = [each for i in inside for each in self._sizes()[i].parameters.values() if each.is_part]
        if self._program.sharding is not None:
            parts = self._own_rows(entry, parts)
        for size in _sizes(parts):
            yield Expected(index, index, Sent("all_reduce", self._names[mesh.tensor_group], size))


def _sizes(parameters: Iterable[TracedParameter]) -> Iterator[int]:
    """Yield the bytes of each data type; a tied parameter counts once."""
    distinct = {each.key: each for each in parameters}
    sizes: Counter[torch.dtype] = Counter()
    for each in distinct.values():
        sizes[each.dtype] += each.bytes
    yield from sizes.values()


def _recomputed(entry: RankStage, layer: int) -> bool:
    return any(first <= layer <= last for first, last in entry.recompute)


def _segments(entry: RankStage, singly: bool) -> Iterator[range]:
    """Yield the segments of a backward, last ones first (``stage.segment``)."""
    from penstock.executor.stage.segment import segment_ranges

    ranges = list(segment_ranges(entry.first, entry.last, entry.recompute, singly=singly))
    for first, last, _ in reversed(ranges):
        yield range(first, last + 1)
