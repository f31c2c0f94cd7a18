"""The agent's state machine: a stimulus in, the new state and the actions out; no input or output of its own.

A run on this agent goes ``checking → prepared → running → done``, or leaves that line for ``refused``, ``failed`` or
``stopping → stopped``. Each generation of a run is a record of its own in time: a higher generation waits as successor
until no process of the lower one is left, so two generations never hold a device together.

`schemas.agents` has what is reported to the service, and the data of each event; of the ranks that fail, the first one
that failed by itself is reported, once per generation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from penstock.executor.node.agent_state import ImpossibleStateError, State, broken_invariants
from penstock.executor.node.hearing import blame, on_exit, on_message
from penstock.executor.node.stimuli import Action, Drain, Exited, GraceOver, Said, Stimulus, Synced
from penstock.executor.node.wishes import on_drain, on_reply

STORY_LENGTH = 60


def step(state: State, stimulus: Stimulus) -> tuple[State, list[Action]]:
    """What the stimulus makes of the state, and what is to be done, in this order.

    Raises ImpossibleStateError, with the story, when the result breaks an invariant.
    """
    after = state
    if not (isinstance(stimulus, Said) and stimulus.message.get("kind") == "step"):
        after = replace(state, story=(*state.story[1 - STORY_LENGTH :], str(stimulus)))
    actions: list[Action] = []
    match stimulus:
        case Synced(reply):
            after = on_reply(after, reply, actions)
        case Said():
            after = on_message(after, stimulus, actions)
        case Exited():
            after = on_exit(after, stimulus, actions)
        case GraceOver(run, generation):
            if after.current(run, generation) is not None:
                after = blame(after, run, actions)
        case Drain(reason):
            after = on_drain(after, reason, actions)
        case _:
            assert_never(stimulus)
    faults = broken_invariants(after, actions)
    if faults:
        raise ImpossibleStateError("; ".join(faults), after.story)
    return after, actions
