"""The collectives of a run against those that were predicted: which, over which ranks, how many bytes, in which order.

Predicted are, from a rank's program, the sums of its buckets, ties and parts of gradients, and, from the layers as the
profiler traces them on the meta device, what ranks that share layers send within each forward and backward. What ran
is seen by a dispatch mode around the checked steps. Messages between stages are no collectives, and the sums over all
ranks of the run (of losses, and of the gradients' norm: a number each) belong to no group.
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
from penstock.schemas.program import WITHIN_PASSES, Held, Instruction, Program

if TYPE_CHECKING:
    from penstock.executor.divided.division import Division
    from penstock.executor.run.chain import Chain


class Expected(NamedTuple):
    """A collective that one of the instructions ``first`` to ``last`` starts."""

    first: int
    last: int
    sent: Sent


class Ran(NamedTuple):
    """A collective that instruction ``at`` started."""

    at: int
    sent: Sent


class Inventory(LocalMode):
    """Notes the collectives of checked steps, and compares each step's with the prediction as it ends.

    ``ran``: how many of each kind there were; ``difference``: the first that differs, None as long as none does.
    """

    def __init__(
        self, program: Program, chain: Chain, division: Division | None, groups: Sequence[Any], mark: Sequence[int]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: Counter[CollectiveKind] = Counter()
        self.difference: str | None = None
        self._program, self._mark = program, mark
        self._numbers: dict[str, int] = {  # of groups without this rank torch has a number
            group.group_name: number for number, group in enumerate(groups) if isinstance(group, dist.ProcessGroup)
        }
        self._expected = list(Prediction(program, chain, division, self._numbers).collectives())
        self._seen: list[Ran] = []

    def sends(self, sent: Sent) -> None:
        """Note a collective of one of the program's groups."""
        if sent.group in self._numbers:
            self._seen.append(Ran(self._mark[0], sent))

    def end_step(self, step: int) -> None:
        """Compare what ran since the last one."""
        seen, self._seen = self._seen, []
        self.ran.update(each.sent.operation for each in seen)
        if self.difference is None:
            found = first_difference(self._expected, seen)
            if found is not None:
                self.difference = f"rank {self._program.rank}, step {step}, " + self._words(*found)

    def _words(self, expected: Expected | None, ran: Ran | None) -> str:
        at = ran or expected
        assert at is not None
        index = ran.at if ran is not None else expected.first if expected is not None else 0
        instruction = list(self._program.instructions())[index]
        ranks = ", ".join(map(str, self._program.groups[self._numbers[at.sent.group]]))
        predicted = "nothing was predicted" if expected is None else f"predicted {self._said(expected, ran)}"
        did = "nothing ran" if ran is None else f"ran {_said(ran.sent)}"
        return f"instruction {index} ({instruction}), over ranks {ranks}: {predicted}, {did}"

    def _said(self, expected: Expected, ran: Ran | None) -> str:
        """What was predicted, with where it was where that is what differs."""
        words = _said(expected.sent)
        if ran is None or ran.sent != expected.sent:
            return words
        instructions = list(self._program.instructions())
        return f"{words} between {instructions[expected.first]} and {instructions[expected.last]}"


def _said(sent: Sent) -> str:
    return f"{sent.operation.replace('_', '-')} of {sent.bytes} bytes"


def first_difference(expected: Iterable[Expected], ran: Iterable[Ran]) -> tuple[Expected | None, Ran | None] | None:
    """The first pair that differs, group by group in order; None where all ran as predicted."""
    planned: dict[str, list[Expected]] = defaultdict(list)
    seen: dict[str, list[Ran]] = defaultdict(list)
    for each in expected:
        planned[each.sent.group].append(each)
    for one in ran:
        seen[one.sent.group].append(one)
    found = []
    for group in planned.keys() | seen.keys():
        pairs = zip_longest(planned[group], seen[group])
        wrong = next((pair for pair in pairs if not _agree(*pair)), None)
        if wrong is not None:
            found.append(wrong)
    return min(found, key=_place, default=None)


def _agree(expected: Expected | None, ran: Ran | None) -> bool:
    if expected is None or ran is None:
        return False
    same = expected.sent == ran.sent
    if ran.sent.operation == "all_to_all":  # whose bytes the tokens decide
        same = expected.sent[:2] == ran.sent[:2]
    return same and expected.first <= ran.at <= expected.last


def _place(pair: tuple[Expected | None, Ran | None]) -> int:
    expected, ran = pair
    return min(each for each in (expected and expected.first, ran and ran.at) if each is not None)


class _Unit(NamedTuple):
    """Parameters whose rows ranks share out, in one collective over ``group``; ``layers``: those that have them."""

    group: str
    bytes: int
    layers: tuple[int, ...]


class Prediction:
    """What one step of a program starts, read off its instructions, and of layers off their traces."""

    def __init__(self, program: Program, chain: Chain, division: Division | None, numbers: Mapping[str, int]) -> None:
        self._program = program
        self._instructions = list(program.instructions())
        self._names = {number: name for name, number in numbers.items()}
        self._layers: dict[tuple[str, ...], Mapping[int, Sequence[TracedLayer]]] = {
            modules: traced_layers(chain, division, sizes_of(program), modules)
            for modules in dict.fromkeys(held.modules for held in program.stages)
        }
        self._tied = {tie.name: tie for tie in chain.ties}
        self._split = {one.stage for one in self._instructions if one.kind == "W"}

    def collectives(self) -> Iterator[Expected]:
        """In the order of the instructions that may start them first, and of each group in its order."""
        again: set[tuple[int, int]] = set()
        for index, one in enumerate(self._instructions):
            held = self._program.stage(one.stage)
            if one.kind in ("F", "B", "I", "R", "W"):
                yield from (Expected(index, index, each) for each in self._within(one, held, again))
            elif one.kind == "UNSHARD":
                yield from (Expected(index, index, each) for each in self._moved("all_gather", held, one.micro_batch))
            elif one.kind == "REDUCE":
                yield from self._bucket(index, one, held)
            elif one.kind == "STEP":
                yield from self._gathered(index, held)
            elif one.kind == "REDUCE_SHARED":
                tie = self._program.shared[one.micro_batch]
                (layer, name), *_ = self._tied[tie.name].places
                size = self._sizes()[layer].parameters[name].bytes
                yield Expected(index, index, Sent("all_reduce", self._names[tie.group], size))
            elif one.kind == "REDUCE_PARTS":
                yield from self._parts(index, held)

    def _sizes(self) -> Sequence[TracedLayer]:
        return next(iter(next(iter(self._layers.values())).values()))

    def _within(self, one: Instruction, held: Held, again: set[tuple[int, int]]) -> Iterator[Sent]:
        """What an operation's layers send."""
        low, high = held.rows[self._program.row_class(one.micro_batch)]
        layers = self._layers[held.modules][high - low]
        inside = range(held.first, held.last + 1)
        key = one.stage, one.micro_batch
        if one.kind == "R":
            again.add(key)
        if self._program.sharding in WITHIN_PASSES:
            yield from self._layer_by_layer(one, held, layers, again=key not in again)
        elif one.kind == "F":
            yield from (sent for i in inside for sent in layers[i].forward)
        elif one.kind == "R":
            yield from (sent for i in inside if _recomputed(held, i) for sent in layers[i].forward)
        elif one.kind in ("B", "I"):
            for segment in _segments(held, one.stage in self._split):
                if _recomputed(held, segment[0]) and key not in again:
                    yield from (sent for i in segment for sent in layers[i].forward)
                now = one.kind == "B" or self._is_early(segment)
                yield from (sent for i in reversed(segment) if now or i for sent in layers[i].backward)
        elif held.first == 0 and not self._is_early(list(_segments(held, True))[-1]):
            yield from layers[0].backward  # no gradient of the batch's inputs is wanted, so that all is the weights'

    def _layer_by_layer(
        self, one: Instruction, held: Held, layers: Sequence[TracedLayer], *, again: bool
    ) -> Iterator[Sent]:
        """What an operation's layers send where each gathers parameters, or sums gradients, by itself."""
        gathers = self._program.sharding == "parameters"

        def forward(some: Iterable[int]) -> Iterator[Sent]:
            for i in some:
                yield from self._of_layers("all_gather", held, [i]) if gathers else ()
                yield from layers[i].forward

        if one.kind != "B":
            inside = range(held.first, held.last + 1)
            yield from forward(inside if one.kind == "F" else filter(partial(_recomputed, held), inside))
            return
        segments = list(_segments(held, True))
        before = [_recomputed(held, segment[0]) and again for segment in segments[1:]]
        begun = False
        for segment, runs_next in zip(segments, [*before, True], strict=True):
            if _recomputed(held, segment[0]) and again:
                yield from forward(segment)
                begun = False
            for i in reversed(segment):
                if gathers and not begun:
                    yield from self._of_layers("all_gather", held, [i])
                begun = i > segment[0] or not runs_next
                if gathers and begun:
                    yield from self._of_layers("all_gather", held, [i - 1])
                yield from layers[i].backward
                yield from self._of_layers("reduce_scatter", held, [i])

    def _is_early(self, segment: range) -> bool:
        """Whether the first layer has a parameter of other layers of its segment, which gets all of its gradient in I.

        Its parts come from several layers, so that no W of one of them can make it (``stage.split_backward``).
        """
        return any({0} < set(segment) & set(tie.layers) for tie in self._tied.values())

    def _summed(self, held: Held, number: int) -> list[tuple[int, list[TracedParameter]]]:
        """A bucket's parameters with the number of the group that sums them; those of shared-out experts are apart."""
        first, last, group = held.buckets[number]
        expert_group = held.expert_groups[number] if held.expert_groups else -1
        shared = {tie.name for tie in self._program.shared}  # in no bucket; others in that of their first layer
        elsewhere = {
            place
            for tie in self._tied.values()
            for place in tie.places
            if tie.name in shared or place[0] != tie.layers[0]
        }
        named = [(i, name, each) for i in range(first, last + 1) for name, each in self._sizes()[i].parameters.items()]
        own = [each for i, name, each in named if each.trained and (i, name) not in elsewhere]
        return [
            (over, [each for each in own if each.is_expert == apart])
            for over, apart in ((group, False), (expert_group, True))
            if over >= 0
        ]

    def _flats(self, held: Held) -> dict[int, list[tuple[int, bool, list[int]]]]:
        """Of each bucket that is reduced, the groups of its buffers, one per data type, and the bytes that each sends.

        Where ranks share out the optimizer's states, even shares are sent together, others (False) one by one.
        """
        loads: dict[int, list[int]] = {}
        found: dict[int, list[tuple[int, bool, list[int]]]] = {}
        for number, _ in enumerate(held.buckets):
            found[number] = flats = []
            for group, parameters in self._summed(held, number):
                ranks = self._program.groups[group]
                shares = [parameters]
                if self._program.shard_states:
                    sizes = {id(each): each.whole_bytes for each in parameters}
                    shares = shares_of(parameters, loads.setdefault(group, [0] * len(ranks)), sizes)
                for dtype in dict.fromkeys(each.dtype for each in parameters):
                    sent = [sum(each.bytes for each in share if each.dtype == dtype) for share in shares]
                    even = are_even(sent)
                    flats.append((group, even, [max(sent) * len(sent)] if even else [size for size in sent if size]))
        return found

    def _units(self, held: Held, number: int) -> list[_Unit]:
        """What ranks gather, and sum, of a bucket whose rows they share out, in one collective each."""
        inside: defaultdict[str, list[int]] = defaultdict(list)
        for i in range(held.first, held.last + 1):
            for each in self._sizes()[i].parameters.values():
                inside[each.key].append(i)
        within = self._program.sharding in WITHIN_PASSES
        found = []
        for group, parameters in self._summed(held, number):
            ranks = len(self._program.groups[group])
            sizes: Counter[tuple[torch.dtype, tuple[int, ...]]] = Counter()
            for each in parameters:
                layers = tuple(inside[each.key])
                sizes[each.dtype, layers if within else ()] += each.padded_bytes(ranks)
            found += [_Unit(self._names[group], size, layers) for (_, layers), size in sizes.items()]
        return found

    def _moved(self, operation: CollectiveKind, held: Held, number: int) -> Iterator[Sent]:
        yield from (Sent(operation, unit.group, unit.bytes) for unit in self._units(held, number))

    def _of_layers(self, operation: CollectiveKind, held: Held, layers: Iterable[int]) -> Iterator[Sent]:
        """What ranks gather or sum of some layers; of what several of these have, once."""
        order = sorted(range(len(held.buckets)), key=lambda number: held.buckets[number][0])
        units = [unit for number in order for unit in self._units(held, number)]
        wanted = dict.fromkeys(k for i in layers for k, unit in enumerate(units) if i in unit.layers)
        yield from (Sent(operation, units[k].group, units[k].bytes) for k in wanted)

    def _own_rows(self, held: Held, parameters: Iterable[TracedParameter]) -> list[TracedParameter]:
        """The parameters with the bytes of this rank's rows, where ranks share them out."""
        shared = {
            each.key: self._program.groups[group]
            for number in range(len(held.buckets))
            for group, members in self._summed(held, number)
            for each in members
        }
        found = []
        for each in parameters:
            ranks = shared.get(each.key, (self._program.rank,))
            found.append(each._replace(bytes=each.bytes_of(ranks.index(self._program.rank), len(ranks))))
        return found

    def _bucket(self, index: int, one: Instruction, held: Held) -> Iterator[Expected]:
        """A bucket's sums, which start at last when they are waited for; those of shared-out experts are apart."""
        end = self._instructions.index(one._replace(kind="WAIT_REDUCE"), index)
        if self._program.sharding is not None:
            yield from (Expected(index, end, each) for each in self._moved("reduce_scatter", held, one.micro_batch))
            return
        together: CollectiveKind = "reduce_scatter" if self._program.shard_states else "all_reduce"
        for group, even, sizes in self._flats(held)[one.micro_batch]:
            for size in sizes:
                yield Expected(index, end, Sent(together if even else "reduce", self._names[group], size))

    def _gathered(self, index: int, held: Held) -> Iterator[Expected]:
        """The parameters that ranks step for each other."""
        if self._program.sharding == "gradients":
            inside = range(held.first, held.last + 1)
            yield from (Expected(index, index, each) for each in self._of_layers("all_gather", held, inside))
        for flats in self._flats(held).values() if self._program.shard_states else ():
            for group, even, sizes in flats:
                for size in sizes:
                    yield Expected(index, index, Sent("all_gather" if even else "broadcast", self._names[group], size))

    def _parts(self, index: int, held: Held) -> Iterator[Expected]:
        """The sum of those gradients of which each rank has a part."""
        mesh = self._program.mesh
        assert mesh is not None
        inside = range(held.first, held.last + 1)
        parts = [each for i in inside for each in self._sizes()[i].parameters.values() if each.is_part]
        if self._program.sharding is not None:
            parts = self._own_rows(held, parts)
        for size in _sizes(parts):
            yield Expected(index, index, Sent("all_reduce", self._names[mesh.tensor_group], size))


def _sizes(parameters: Iterable[TracedParameter]) -> Iterator[int]:
    """The bytes of each data type; a tied parameter counts once."""
    distinct = {each.key: each for each in parameters}
    sizes: Counter[torch.dtype] = Counter()
    for each in distinct.values():
        sizes[each.dtype] += each.bytes
    yield from sizes.values()


def _recomputed(held: Held, layer: int) -> bool:
    return any(first <= layer <= last for first, last in held.recompute)


def _segments(held: Held, singly: bool) -> Iterator[range]:
    """The segments of a backward, last ones first (``stage.segment``)."""
    from penstock.executor.stage.segment import segment_ranges

    found = list(segment_ranges(held.first, held.last, held.recompute, singly=singly))
    for first, last, _ in reversed(found):
        yield range(first, last + 1)
