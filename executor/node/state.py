"""The agent's state machine: from a state and a stimulus to a new state and actions, without input or output.

A run on this agent goes ``checking → prepared → running → done``, or leaves that line for ``refused``, ``failed`` or
``stopping → stopped``. Each generation of a run has a separate record. A higher generation waits as successor until no
process of the lower one is left, so two generations never hold a device together.

`schemas.api.agents` defines the reports to the service, and the data of each event. Of the ranks that fail, only the
first one that failed by itself is reported, once per generation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from penstock.executor.node.agent_state import ImpossibleStateError, State, broken_invariants
from penstock.executor.node.assignments import on_drain, on_reply
from penstock.executor.node.child_reports import blame, on_exit, on_message
from penstock.executor.node.stimuli import Action, ChildMessage, Drain, Exited, GraceOver, Stimulus, Synced

HISTORY_LENGTH = 60


def step(state: State, stimulus: Stimulus) -> tuple[State, list[Action]]:
    """Return the state after a stimulus, and the actions to execute, in this order.

    Raises ImpossibleStateError, with the history, when the result breaks an invariant.
    """
    following = state
    if not (isinstance(stimulus, ChildMessage) and stimulus.message.get("kind") == "step"):
        following = replace(state, history=(*state.history[1 - HISTORY_LENGTH :], str(stimulus)))
    actions: list[Action] = []
    match stimulus:
        case Synced(reply):
            following = on_reply(following, reply, actions)
        case ChildMessage():
            following = on_message(following, stimulus, actions)
        case Exited():
            following = on_exit(following, stimulus, actions)
        case GraceOver(run, generation):
            if following.current(run, generation) is not None:
                following = blame(following, run, actions)
        case Drain(reason):
            following = on_drain(following, reason, actions)
        case _:
            assert_never(stimulus)
    faults = broken_invariants(following, actions)
    if faults:
        raise ImpossibleStateError("; ".join(faults), following.history)
    return following, actions
