"""How many copies of tokens go to the experts of a layer, and how many reach those of the busiest GPU.

Without a capacity no copy is dropped: every token is sent to ``per_token`` experts. With one every expert gets exactly
``capacity_factor`` times its even share, dropped or padded to it, as Megatron's ``--moe-expert-capacity-factor`` with
``--moe-pad-expert-input-to-capacity``; an expert never gets a token twice. That capacities are whole numbers of tokens
is left out.
"""

from __future__ import annotations

from fractions import Fraction

from penstock.schemas.transformers.shape import Experts


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
