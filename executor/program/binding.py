"""The binding of a program: every instruction becomes a bound method with its arguments, prepared once.

Properties that depend on other instructions (is this the last message that reads an output? does a backward follow a
REDUCE?) are computed here, so that the running program decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.executor.program.actions import Actions, Message
from penstock.executor.program.global_batch import GlobalBatch, Source
from penstock.executor.program.neighbours import GRADIENTS, Neighbours
from penstock.executor.program.window import Window, window
from penstock.executor.run.chain import Chain, TensorShape
from penstock.executor.stage.held_stage import Cell, HeldStage
from penstock.executor.stage.reduction import sum_parts, sum_tie, uses
from penstock.executor.stage.stage_module import MicroBatch
from penstock.executor.transport.codec import carrier
from penstock.schemas.errors import InvalidDocument, ModelMismatch, UnsupportedRequest
from penstock.schemas.program import Channel, Instruction, Program

Call = tuple[Callable[..., Any], tuple[Any, ...]]
Wait = Callable[[], object] | None

_FORWARD = ("LOAD", "F", "SEND_F", "RECV_F", "LOCAL_F")


@dataclass
class Code:
    """A segment of a program: its calls, the wait of a traced run before each call, and whether it has run before."""

    calls: list[Call]
    waits: list[Wait]
    has_run: bool = False


@dataclass
class Bound:
    """A program bound to the stages of a rank.

    ``batches``: the global batches that can be under way. ``cells``: micro-batches by stage and number.
    """

    program: Program
    window: Window
    batches: list[GlobalBatch]
    cells: dict[tuple[int, int], Cell]
    segments: list[Code] = field(default_factory=list)

    @property
    def prologue(self) -> Code:
        """The segment that runs once, first."""
        return self.segments[0]

    @property
    def phases(self) -> list[Code]:
        """The repetitions of the body that are bound separately, and run in turn."""
        return self.segments[1:-1]

    @property
    def epilogue(self) -> Code:
        """The segment that runs once, last."""
        return self.segments[-1]


class Binder:
    """A binder of one program to the stages of its rank; ``bound``: an earlier binding whose micro-batches are reused.

    Raises ModelMismatch where gradients would get lost.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, HeldStage],
        actions: Actions,
        chain: Chain,
        shapes: Sequence[dict[str, TensorShape]],
        source: Source,
        bound: Bound | None = None,
    ) -> None:
        self.program = program
        self.stages = stages
        self.actions = actions
        self.chain = chain
        self.shapes = shapes
        self._carriers = [carrier(channel, actions.transport) for channel in program.channels]
        self.window = window(program)
        self.instructions = self.window.instructions
        self._span = self.window.width * program.num_micro_batches
        self.bound = bound or self._unbound(source)

    def bind(self) -> Bound:
        """Bind all instructions."""
        self._refuse_lost_gradients()
        self._neighbours = self._find_neighbours()
        calls = [self._call(index, one) for index, one in enumerate(self.instructions)]
        waits = [self._wait_of(index, one) for index, one in enumerate(self.instructions)]
        bounds = self.window.bounds
        wanted = [0, *range(1, 1 + self.window.phases), len(bounds) - 2] if len(bounds) > 2 else [0]
        for k in wanted:
            part = slice(bounds[k], bounds[k + 1])
            self.bound.segments.append(Code(calls[part], waits[part]))
        if len(wanted) == 1:
            self.bound.segments.append(Code([], []))
        return self.bound

    def bind_evaluation(self) -> Code:
        """Bind the forwards of the first global batch, and their messages."""
        self._neighbours = self._find_neighbours()
        count = self.program.num_micro_batches
        calls = []
        for index, one in enumerate(self.instructions):
            if one.kind in _FORWARD and one.micro_batch < count:
                stage = self._stage(one)
                cell = self._cell(one)
                if one.kind == "F":
                    calls.append((self.actions.evaluate, (stage.module, cell)) if len(cell.rows) else (_nothing, ()))
                elif one.kind != "LOAD":
                    calls.append(self._call(index, one))
        return Code(calls, [])

    # Micro-batches and global batches

    def _unbound(self, source: Source) -> Bound:
        batches = self._global_batches(source)
        return Bound(self.program, self.window, batches, self._cells(batches))

    def _global_batches(self, source: Source) -> list[GlobalBatch]:
        count, width = self.program.num_micro_batches, self.window.width
        losses: dict[int, int] = {}
        reads: dict[int, dict[tuple[int, int], int]] = {}
        for one in self.instructions:
            if one.kind != "F":
                continue
            stage = self._stage(one)
            rows, batch = self._rows(stage, one.micro_batch), one.micro_batch // count
            if stage.module.is_last and len(rows):
                losses[batch] = losses.get(batch, 0) + 1
            if stage.module.is_last or stage.module.reads_batch:
                key = rows.start, rows.stop
                of_batch = reads.setdefault(batch, {})
                of_batch[key] = of_batch.get(key, 0) + 1
        return [GlobalBatch(source, losses.get(k, 0), reads.get(k, {})) for k in range(width)]

    def _cells(self, batches: Sequence[GlobalBatch]) -> dict[tuple[int, int], Cell]:
        cells: dict[tuple[int, int], Cell] = {}
        count = self.program.num_micro_batches
        for one in self.instructions:
            key = one.stage, one.micro_batch % self._span
            if one.kind == "F" and key not in cells:
                stage = self._stage(one)
                rows = self._rows(stage, one.micro_batch)
                low = stage.entry.rows[self.program.row_class(one.micro_batch)][0]
                place = one.micro_batch % count
                cells[key] = Cell(place, rows, stage.module.seeds(place, low), batches[key[1] // count])
        return cells

    def _rows(self, stage: HeldStage, micro_batch: int) -> range:
        low, high = stage.entry.rows[self.program.row_class(micro_batch)]
        start = first_row(self.program, micro_batch)
        return range(start + low, start + high)

    def _stage(self, one: Instruction) -> HeldStage:
        stage = self.stages.get(one.stage)
        if stage is None:
            raise InvalidDocument(f"rank {self.program.rank} runs {one}, but does not hold stage {one.stage}")
        return stage

    def _cell(self, one: Instruction, stage: int | None = None) -> Cell:
        key = one.stage if stage is None else stage, one.micro_batch % self._span
        cell = self.bound.cells.get(key)
        if cell is None:
            raise InvalidDocument(f"rank {self.program.rank} runs {one}, but has no forward for it")
        return cell

    # Calls

    def _find_neighbours(self) -> Neighbours:
        idle = {index for index, one in enumerate(self.instructions) if one.kind in GRADIENTS and not self._busy(one)}
        return Neighbours(self.instructions, {number: stage.entry for number, stage in self.stages.items()}, idle)

    def _busy(self, one: Instruction) -> bool:
        return len(self._cell(one).rows) > 0

    def _refuse_lost_gradients(self) -> None:
        """Raise ModelMismatch for a backward whose cut needs gradients that no message brings."""
        fed = {(i.stage, i.micro_batch) for i in self.instructions if i.kind == "RECV_B"}
        for one in self.instructions:
            if one.kind == "LOCAL_B":
                fed.add((self._channel(one.channel + 1, one).stage, one.micro_batch))
        for one in self.instructions:
            if one.kind in ("B", "I") and (one.stage, one.micro_batch) not in fed:
                module = self._stage(one).module
                if not module.is_last and any(module.needs_grad[-1]):
                    names = [name for name, shape in self.shapes[module.last].items() if shape.needs_grad]
                    raise ModelMismatch(
                        f"tensors {names} after layer {self.chain.names[module.last]!r} have gradients, but the plan "
                        f"sends none back before {one}",
                        remedy="profile this model and plan with that profile",
                    )

    def _call(self, index: int, one: Instruction) -> Call:
        stage = self._stage(one)
        match one.kind:
            case "F" | "B" | "I" | "W" | "R" | "LOAD" | "FREE":
                return self._compute_call(one.kind, stage, self._cell(one))
            case "SEND_F" | "SEND_B" | "RECV_F" | "RECV_B":
                return self._message_call(one, self._cell(one), self._neighbours.is_last(index))
            case "LOCAL_F" | "LOCAL_B":
                return self._local_call(one, self._cell(one), self._neighbours.is_last(index))
            case "REDUCE":
                return self._reduce_call(index, one, stage)
            case "WAIT_REDUCE":
                reduction = stage.reduction
                reduced = reduction is not None and one.micro_batch in reduction.buckets
                return (reduction.wait, (one.micro_batch,)) if reduction is not None and reduced else (_nothing, ())
            case "REDUCE_SHARED":
                holders = [each for each in self.stages.values() if one.micro_batch in each.ties]
                return (sum_tie, (holders[0], one.micro_batch)) if holders else (_nothing, ())
            case "REDUCE_PARTS":
                return (sum_parts, (stage,)) if stage.part_group is not None else (_nothing, ())
            case "UNSHARD" | "RESHARD":
                shards = stage.shards
                if shards is None:
                    return _nothing, ()
                return (shards.unshard if one.kind == "UNSHARD" else shards.reshard), (one.micro_batch,)
            case "STEP":
                return self._step_call(index, stage)
            case "NORM" | "WAIT_NORM":
                norm = self.actions.norm
                assert norm is not None, "a program with NORM, bound without it"
                return (norm.start if one.kind == "NORM" else norm.wait), ()
            case "VERSION":
                return (_nothing, ()) if stage.versions is None else (stage.versions.use, (one.micro_batch,))
            case "AVG_PULL" | "AVG_PUSH":
                averaging = stage.averaging
                if averaging is None or one.micro_batch not in averaging.buckets:
                    return _nothing, ()
                return (averaging.pull if one.kind == "AVG_PULL" else averaging.push), (one.micro_batch,)
            case _:
                raise UnsupportedRequest(f"instruction {one} is not supported")

    def _compute_call(self, kind: str, stage: HeldStage, cell: Cell) -> Call:
        module, actions = stage.module, self.actions
        if not len(cell.rows):
            return _nothing, ()
        match kind:
            case "F":
                function = self._forward(stage)
                if stage.versions is None:
                    return function, (module, cell)
                return actions.forward_versioned, (stage.versions, function, module, cell)
            case "B" | "I" | "W" | "R":
                return self._backward_call(kind, stage, cell)
            case "LOAD":
                return (actions.load if module.reads_batch or module.is_last else _nothing_of), (cell,)
            case _:
                return cell.clear, ()

    def _forward(self, stage: HeldStage) -> Callable[..., Any]:
        module, actions = stage.module, self.actions
        if not module.is_last:
            return actions.forward_reading if module.reads_batch else actions.forward
        if stage.scale is None:
            return actions.forward_last
        return partial(actions.forward_normalised, stage.row_group)

    def _backward_call(self, kind: str, stage: HeldStage, cell: Cell) -> Call:
        module, actions = stage.module, self.actions
        functions: dict[str, Callable[..., None]] = {
            "B": actions.backward,
            "I": actions.backward_input,
            "W": actions.backward_weight,
            "R": actions.recompute,
        }
        function = functions[kind]
        if kind in ("B", "I") and module.is_last and stage.scale is not None:
            function = actions.backward_normalised if kind == "B" else actions.backward_input_normalised
        if stage.versions is None:
            return function, (module, cell)
        return actions.backward_versioned, (stage.versions, function, module, cell, kind in GRADIENTS)

    def _reduce_call(self, index: int, one: Instruction, stage: HeldStage) -> Call:
        reduction = stage.reduction
        if reduction is None or one.micro_batch not in reduction.buckets:
            return _nothing, ()
        follower = self._neighbours.next_gradient.get(index)
        if follower is None:
            return reduction.start, (one.micro_batch,)
        bucket = reduction.buckets[one.micro_batch]
        module = self.stages[follower.stage].module
        if stage.versions is None:
            firings = sum(uses(module, parameter) for parameter in bucket.leaves)
            return reduction.arm, (one.micro_batch, firings, lambda: bucket.leaves)
        place = {id(p): i for i, p in enumerate(stage.versions.parameters)}
        places = [place[id(p)] for p in bucket.parameters]
        firings = sum(uses(module, stage.versions.current.parameters[i]) for i in places)
        cell = self._cell(follower)

        def parameters() -> list[Any]:
            assert cell.version is not None, "a backward without its forward"
            return [cell.version.parameters[i] for i in places]

        return reduction.arm, (one.micro_batch, firings, parameters)

    def _step_call(self, index: int, stage: HeldStage) -> Call:
        count, every = self.program.num_micro_batches, stage.entry.update_every
        number = self._neighbours.step_number[index]
        last = ((number + 1) * every - 1) // count
        ends = (number + 1) * every % count == 0
        within = self.bound.batches[last % self.window.width]
        clears = self.program.batches > 1 or every < count
        return self.actions.optimizer_step, (stage, within, ends, clears)

    def _channel(self, number: int, one: Instruction) -> Channel:
        if not 0 <= number < len(self.program.channels):
            raise InvalidDocument(f"{one} names channel {number}; the program has {len(self.program.channels)}")
        return self.program.channels[number]

    def _cut_of(self, channel: Channel) -> int:
        """Return the cut that a channel crosses: after the stage for messages forward from it, otherwise before it."""
        entry = self.stages[channel.stage].entry
        return entry.last if channel.peer_stage == entry.next else entry.first - 1

    def _messages(self, one: Instruction, cell: Cell) -> tuple[list[Message], list[TensorShape]]:
        """Return messages and shapes. Tags are unique within a global batch; the next batch's messages come later."""
        channel = self._channel(one.channel, one)
        shapes = list(self.shapes[self._cut_of(channel)].values())
        low, high = channel.rows[self.program.row_class(one.micro_batch)]
        whole = (low, high) == (0, len(cell.rows))
        messages: list[Message] = []
        ends = self._carriers[one.channel]
        move = ends.send if one.kind.startswith("SEND") else ends.receive
        for t, shape in enumerate(shapes):
            if high > low and (shape.needs_grad or channel.kind == "F"):
                tag = channel.tag + one.micro_batch % self.program.num_micro_batches * len(shapes) + t
                size_bytes = shape.bytes_per_sample * (high - low)
                messages.append((t, -1 if whole else low, high, move, channel.peer, tag, size_bytes))
        return messages, shapes

    def _message_call(self, one: Instruction, cell: Cell, is_last: bool) -> Call:
        messages, shapes = self._messages(one, cell)
        if not messages and not (is_last and len(cell.rows)):
            return _nothing, ()
        if one.kind == "SEND_F":
            return self.actions.send_forward, (cell, messages, is_last)
        if one.kind == "SEND_B":
            return self.actions.send_backward, (cell, messages, is_last)
        sizes = [((len(cell.rows), *shape.sample_shape), shape.dtype) for shape in shapes]
        if not messages:
            return _nothing, ()
        if one.kind == "RECV_F":
            return self.actions.receive_forward, (cell, messages, sizes)
        wanted = [size if shape.needs_grad else None for size, shape in zip(sizes, shapes, strict=True)]
        return self.actions.receive_backward, (cell, messages, wanted)

    def _local_call(self, one: Instruction, cell: Cell, is_last: bool) -> Call:
        sending, receiving = self._channel(one.channel, one), self._channel(one.channel + 1, one)
        cls = self.program.row_class(one.micro_batch)
        target = self._cell(one, receiving.stage)
        source_rows, target_rows = sending.rows[cls], receiving.rows[cls]
        whole = source_rows == (0, len(cell.rows)) and target_rows == (0, len(target.rows))
        copy = None if whole else (slice(*source_rows), slice(*target_rows), len(target.rows))
        function = self.actions.hand_forward if one.kind == "LOCAL_F" else self.actions.hand_backward
        return function, (cell, target, copy, is_last)

    def _wait_of(self, index: int, one: Instruction) -> Wait:
        """Return the function that a traced step calls before it notes an instruction's start."""
        if one.kind == "F":
            return self._cell(one).wait_inputs
        if one.kind in ("B", "I"):
            return self._cell(one).wait_gradients
        if one.kind != "STEP":
            return None
        stage, within, ends, _ = self._step_call(index, self._stage(one))[1]
        return within.finish if ends and stage.scale is None else None


def first_row(program: Program, micro_batch: int) -> int:
    """Return the first sample of a micro-batch within its global batch."""
    (rows, number), *smaller = program.row_classes
    place = micro_batch % program.num_micro_batches
    if place <= number:
        return rows * place
    return rows * number + smaller[0][0] * (place - number)


def _nothing() -> None:
    """Do nothing, for an instruction that moves nothing here."""


def _nothing_of(_: MicroBatch) -> None:
    """Do nothing, for an instruction with a micro-batch."""
