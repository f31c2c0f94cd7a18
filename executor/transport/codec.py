"""Automatic precision compression: fp32 tensors travel as fp16 with a power of two as scaler (WPipe, appendix A.3).

The rule is ALGORITHMS 5.5, [R-27]. x is divided by 2^k, where k >= 0 is the smallest with max|x| / 2^k <= 65504, the
largest number of fp16. Where max|x| is at most 2^15, k <= 0 is the smallest with max|x| / 2^k <= 2^15, which lifts
small gradients. Dividing by a power of two is exact, so the only loss is fp16's rounding: at most 2^-11 of each number
with |x| / 2^k >= 2^-14. A tensor with a NaN, an infinity or a number above 65504 x 2^112, which rounding could carry
beyond fp32, is not converted: its message has a flag for that, and the full tensor follows under a separate tag.

A message has a fixed size: two bytes per number, then the header (k as four bytes, the flag as one). The header comes
last so that the numbers are aligned. Tensors of other types are sent unchanged.
"""

from __future__ import annotations

import math
import statistics
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.executor.runtime.interface import Runtime
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import CODEC_HEADER_BYTES, CODECS, Channel

if TYPE_CHECKING:
    from penstock.executor.transport import Transport

FALLBACK_TAG = 1 << 30
"""The number that is added to a message's tag for the full tensor that follows it."""

_LARGEST, _LARGEST_EXPONENT = 65504.0, 16
_LARGEST_PEAK = 65504.0 * 2.0**112
_LIFTED_EXPONENT = 15
_SMALLEST_EXPONENT = -126
_HEADER = struct.Struct("<i?")
assert _HEADER.size == CODEC_HEADER_BYTES


def encode(tensor: Tensor) -> tuple[Tensor, bool]:
    """Encode a contiguous fp32 tensor; return the message, and whether it is enough (False: not converted).

    On a GPU the scaler is read back, so the host waits for the tensor.
    """
    count = tensor.numel()
    message = torch.empty(2 * count + CODEC_HEADER_BYTES, dtype=torch.uint8, device=tensor.device)
    low, high = torch.stack(torch.aminmax(tensor)).tolist() if count else (0.0, 0.0)
    converts = -low <= _LARGEST_PEAK and high <= _LARGEST_PEAK
    exponent = scaler_exponent(max(-low, high)) if converts else 0
    if converts:
        numbers = message[: 2 * count].view(torch.float16)
        torch.mul(tensor.view(-1), 2.0**-exponent, out=numbers)
    header = torch.tensor(list(_HEADER.pack(exponent, converts)), dtype=torch.uint8)
    message[2 * count :].copy_(header)
    return message, converts


def decode(message: Tensor, tensor: Tensor) -> bool:
    """Write the numbers of a message into a contiguous fp32 tensor; False when the full tensor follows instead."""
    count = tensor.numel()
    exponent, converts = _HEADER.unpack(bytes(message[2 * count :].tolist()))
    if converts:
        tensor.view(-1).copy_(message[: 2 * count].view(torch.float16))
        if exponent:
            tensor.mul_(2.0**exponent)
    return bool(converts)


def scaler_exponent(peak: float) -> int:
    """Return k of the scaler 2^k for a tensor whose largest absolute value is ``peak``."""
    if peak == 0:
        return 0
    fraction, exponent = math.frexp(peak)
    above = exponent - _LARGEST_EXPONENT + (fraction > _LARGEST / 2.0**_LARGEST_EXPONENT)
    if above > 0:
        return above
    lifted = exponent - _LIFTED_EXPONENT - (fraction == 0.5)
    return max(_SMALLEST_EXPONENT, min(0, lifted))


_ROUNDS = 20
"""Measurements of a conversion."""


def conversion_bytes_per_s(runtime: Runtime, size_bytes: int) -> tuple[float, float]:
    """Measure bytes of fp32 encoded, and decoded, per second: the medians of ``_ROUNDS`` measurements."""
    tensor = torch.randn(max(1, size_bytes // 4), device=runtime.device)
    message, _ = encode(tensor)
    conversions: tuple[Callable[[], object], ...] = (partial(encode, tensor), partial(decode, message, tensor))
    times: tuple[list[int], list[int]] = ([], [])
    for _ in range(_ROUNDS + 1):
        for k, convert in enumerate(conversions):
            start = time.perf_counter_ns()
            convert()
            runtime.synchronize()
            times[k].append(time.perf_counter_ns() - start)
    encoding, decoding = (tensor.nbytes * 1e9 / max(1, statistics.median(one[1:])) for one in times)
    return encoding, decoding


class CodecTransport:
    """A transport that encodes fp32 tensors, for the channels that name the codec."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.num_fallbacks = 0

    def send(self, tensor: Tensor, peer: int, tag: int, size_bytes: int) -> None:
        """Start to send a contiguous tensor; it must not change until ``drain``."""
        if tensor.dtype != torch.float32:
            self._transport.send(tensor, peer, tag, size_bytes)
            return
        message, is_enough = encode(tensor)
        self._transport.send(message, peer, tag, message.numel())
        if not is_enough:
            self.num_fallbacks += 1
            self._transport.send(tensor, peer, FALLBACK_TAG + tag, size_bytes)

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Any:
        """Start to receive into a contiguous tensor; ``wait()`` on the result."""
        if buffer.dtype != torch.float32:
            return self._transport.receive(buffer, peer, tag)
        size_bytes = 2 * buffer.numel() + CODEC_HEADER_BYTES
        message = torch.empty(size_bytes, dtype=torch.uint8, device=buffer.device)
        return _Arrival(self._transport.receive(message, peer, tag), message, buffer, self._transport, (peer, tag))


class _Arrival:
    """A message that is being received; waiting for it decodes it, or waits for the full tensor."""

    __slots__ = ("_buffer", "_message", "_place", "_transport", "_work")

    def __init__(
        self, work: Any, message: Tensor, buffer: Tensor, transport: Transport, place: tuple[int, int]
    ) -> None:
        self._work = work
        self._message = message
        self._buffer = buffer
        self._transport = transport
        self._place = place

    def wait(self) -> None:
        self._work.wait()
        if not decode(self._message, self._buffer):
            peer, tag = self._place
            self._transport.receive(self._buffer, peer, FALLBACK_TAG + tag).wait()


def carrier(channel: Channel, transport: Transport) -> Transport | CodecTransport:
    """Return the transport of a channel's messages. Raises UnsupportedRequest for an unknown codec."""
    if channel.codec is None:
        return transport
    if channel.codec not in CODECS:
        raise UnsupportedRequest(f"codec {channel.codec!r} is not supported; known are {', '.join(CODECS)}")
    return CodecTransport(transport)
