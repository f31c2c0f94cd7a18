"""How many copies of tokens go to the experts of a layer, and how many reach those of the busiest GPU.

Without a capacity no copy is dropped: every token is sent to ``per_token`` experts. With one every expert gets exactly
``capacity_factor`` times its even share, dropped or padded to it, as Megatron's ``--moe-expert-capacity-factor`` with
``--moe-pad-expert-input-to-capacity``; an expert never gets a token twice. That capacities are whole numbers of tokens
is left out.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from penstock.schemas.errors import Fault, InvalidDocument, UnsupportedRequest
from penstock.schemas.transformers.shape import Experts, TransformerShape


class Routing(NamedTuple):
    """What a request says of routing in place of the shape: fields of ``Experts``, None where it says nothing."""

    routing_imbalance: float | None = None
    capacity_factor: float | None = None

    @property
    def stated(self) -> dict[str, float]:
        """The fields that are said."""
        return {name: value for name, value in self._asdict().items() if value is not None}


AS_SHAPED = Routing()


def routed(shape: TransformerShape, routing: Routing) -> TransformerShape:
    """Return the shape with tokens routed so.

    Raises InvalidDocument for what is no number, UnsupportedRequest for a model without experts, for an imbalance below
    1, for more tokens than an expert can get, and for an imbalance together with a capacity, under which all experts
    get the same.
    """
    stated = routing.stated
    if not stated:
        return shape
    for name, given in stated.items():
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise InvalidDocument(
                f"the {name.replace('_', ' ')} is a number such as 1.2, not {given!r:.100}",
                faults=(Fault(f"/{name}", "a number", "not-a-number"),),
            )
    said = " and ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in stated.items())
    if shape.experts is None:
        raise UnsupportedRequest(
            f"{shape.name} has no experts, to which {said} would apply",
            faults=tuple(Fault(f"/{name}", "for models with experts") for name in stated),
            remedy="leave it out, or ask for a mixture of experts such as qwen3-30b-a3b",
        )
    if len(stated) > 1:
        raise UnsupportedRequest(
            f"{said} exclude each other: with a capacity all experts get equally many tokens",
            faults=tuple(Fault(f"/{name}", "or the other, not both") for name in stated),
            remedy="give either",
        )
    ((name, value),) = stated.items()
    experts = shape.experts
    least, most = 1.0 if name == "routing_imbalance" else 0.0, experts.number / experts.per_token
    if not (least <= value <= most) or value == 0:
        possible = f"{'at least 1' if least else 'above 0'}, at most {most:g}"
        raise UnsupportedRequest(
            f"{said} is not possible: an expert of {shape.name} gets at most all tokens, {most:g} times its even share"
            + (", and the busiest GPU at least the mean" if value < least else ""),
            faults=(Fault(f"/{name}", possible),),
            remedy=f"a value {possible}",
        )
    as_stated = {"routing_imbalance": 1.0, "capacity_factor": None} | {name: value}
    return shape.model_copy(update={"experts": experts.model_copy(update=as_stated)})


def copies_per_token(experts: Experts) -> Fraction:
    """Copies of a token that are sent, and come back: padding counts."""
    if experts.capacity_factor is None:
        return Fraction(experts.per_token)
    return min(Fraction(experts.number), Fraction(str(experts.capacity_factor)) * experts.per_token)


def busiest(experts: Experts, degree: int) -> Fraction:
    """Copies that the busiest of ``degree`` GPUs gets over the mean.

    A GPU gets at most all copies, and a token at most once for each of its experts; with a capacity all get the same.
    """
    if experts.capacity_factor is not None:
        return Fraction(1)
    most = Fraction(min(degree * experts.per_token, experts.number), experts.per_token)
    return min(most, Fraction(str(experts.routing_imbalance)))
