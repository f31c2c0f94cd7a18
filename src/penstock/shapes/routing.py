"""Numbers of copies of tokens that go to the experts of a layer, and to the experts of the busiest GPU.

Without a capacity no copy is dropped: every token is sent to ``per_token`` experts. With a capacity every expert gets
exactly ``capacity_factor`` times its even share, dropped or padded to it, as Megatron's
``--moe-expert-capacity-factor`` with ``--moe-pad-expert-input-to-capacity``; an expert never gets a token twice.
Capacities are not rounded to whole tokens.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from penstock.schemas.errors import Fault, InvalidDocument, UnsupportedRequest
from penstock.schemas.transformers.shape import Experts, TransformerShape


class Routing(NamedTuple):
    """Routing that a request states in place of the shape's: fields of ``Experts``, None where the shape's holds."""

    routing_imbalance: float | None = None
    capacity_factor: float | None = None

    @property
    def stated(self) -> dict[str, float]:
        """The fields that the request states."""
        return {name: value for name, value in self._asdict().items() if value is not None}


AS_SHAPED = Routing()


def routed(shape: TransformerShape, routing: Routing) -> TransformerShape:
    """Return the shape with the routing that ``routing`` states.

    Raises InvalidDocument for a field that is no number, UnsupportedRequest for a model without experts, for an
    imbalance below 1, for more tokens than an expert can get, and for an imbalance together with a capacity, under
    which all experts get the same.
    """
    stated = routing.stated
    if not stated:
        return shape
    for name, number in stated.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise InvalidDocument(
                f"the {name.replace('_', ' ')} is a number such as 1.2, not {number!r:.100}",
                faults=(Fault(f"/{name}", "a number", "not-a-number"),),
            )
    words = " and ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in stated.items())
    if shape.experts is None:
        raise UnsupportedRequest(
            f"{shape.name} has no experts, so {words} would have no effect",
            faults=tuple(Fault(f"/{name}", "for models with experts") for name in stated),
            remedy="leave it out, or name a mixture-of-experts model such as qwen3-30b-a3b",
        )
    if len(stated) > 1:
        raise UnsupportedRequest(
            f"{words} exclude each other: with a capacity all experts get equally many tokens",
            faults=tuple(Fault(f"/{name}", "give one, not both") for name in stated),
            remedy="give one of them",
        )
    ((name, value),) = stated.items()
    experts = shape.experts
    least, most = 1.0 if name == "routing_imbalance" else 0.0, experts.number / experts.per_token
    if not (least <= value <= most) or value == 0:
        possible = f"{'at least 1' if least else 'above 0'}, at most {most:g}"
        raise UnsupportedRequest(
            f"{words} is not possible: an expert of {shape.name} gets at most all tokens, {most:g} times its even share"
            + (", and the busiest GPU at least the mean" if value < least else ""),
            faults=(Fault(f"/{name}", possible),),
            remedy=f"a value {possible}",
        )
    as_stated = {"routing_imbalance": 1.0, "capacity_factor": None} | {name: value}
    return shape.model_copy(update={"experts": experts.model_copy(update=as_stated)})


def copies_per_token(experts: Experts) -> Fraction:
    """Return the copies of a token that are sent, and come back; padding counts."""
    if experts.capacity_factor is None:
        return Fraction(experts.per_token)
    return min(Fraction(experts.number), Fraction(str(experts.capacity_factor)) * experts.per_token)


def busiest(experts: Experts, degree: int) -> Fraction:
    """Return the ratio of the copies that the busiest of ``degree`` GPUs gets to the mean.

    A GPU gets at most all copies, and a token at most once for each of its experts; with a capacity all get the same.
    """
    if experts.capacity_factor is not None:
        return Fraction(1)
    most = Fraction(min(degree * experts.per_token, experts.number), experts.per_token)
    return min(most, Fraction(str(experts.routing_imbalance)))
