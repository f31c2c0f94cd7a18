"""Named tuples that kernels receive by their address, since a kernel with hundreds of parameters is slow to compile.

Numba passes a named tuple of arrays as seven words for each of them, copies all of them at every call, and spells their
types out in every instruction about any. A tuple of a class that ``Fields`` knows is unpacked once, and calls pass one
pointer. The fields do not change while a kernel runs, and the loads are marked so: they are hoisted out of loops as if
they were locals. A tuple that a kernel itself makes is passed by value as usual.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import hashlib
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.core.imputils import impl_ret_borrowed
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_getattr_generic,
    register_model,
    typeof_impl,
    unbox,
)

from penstock.solvers.compiled.fields import Fields

WORD = 8


class ByAddress(types.Type):
    """The address of the fields of a named tuple; its name is short, as it is part of the names of kernels."""

    def __init__(self, made_of: Any, fields: tuple[Any, ...]) -> None:
        self.made_of, self.fields = made_of, fields
        digest = hashlib.sha256(repr(fields).encode()).hexdigest()[:12]
        super().__init__(f"{made_of.__module__}.{made_of.__qualname__}@{digest}")

    @property
    def key(self) -> tuple[Any, tuple[Any, ...]]:
        """The key that makes two of them the same type."""
        return self.made_of, self.fields


@typeof_impl.register(Fields)
def _typeof(value: Any, context: Any) -> ByAddress:
    return ByAddress(type(value), tuple(typeof_impl(each, context) for each in value))


@register_model(ByAddress)
class _Model(models.OpaqueModel):
    """An address."""


@infer_getattr
class _Fields(AttributeTemplate):
    key = ByAddress

    def generic_resolve(self, value: Any, attr: str) -> Any:  # type: ignore[override]
        names = value.made_of._fields
        return value.fields[names.index(attr)] if attr in names else None


def _places(kind: ByAddress) -> list[int]:
    """Return where each field begins, and where the last one ends, in words."""
    ends = [0]
    for field in kind.fields:
        ends.append(ends[-1] + _words(field))
    return ends


def _words(field: Any) -> int:
    if isinstance(field, types.BaseTuple):
        parts: Any = field
        return sum(_words(each) for each in parts)
    return 5 + 2 * field.ndim if isinstance(field, types.Array) else 1


@lower_getattr_generic(ByAddress)
def _load(context: Any, builder: Any, kind: ByAddress, address: Any, name: str) -> Any:
    number = kind.made_of._fields.index(name)
    field, offset = kind.fields[number], _places(kind)[number] * WORD
    place = cgutils.pointer_add(builder, address, offset, context.get_value_type(field).as_pointer())
    if isinstance(field, types.Array):
        loaded = _load_array(context, builder, field, place)
    else:
        loaded = _invariant(builder, place)
    return impl_ret_borrowed(context, builder, field, loaded)


def _load_array(context: Any, builder: Any, field: Any, place: Any) -> Any:
    """Load the members of an array one by one; without reference counts, the members about its owner are not needed."""
    array = context.make_array(field)(context, builder)
    for number, member in enumerate(context.data_model_manager[field]._fields):
        if member == "itemsize":
            size = context.get_abi_sizeof(context.get_data_type(field.dtype))
            setattr(array, member, context.get_constant(types.intp, size))
        elif member in ("shape", "strides"):
            each = (cgutils.gep_inbounds(builder, place, 0, number, k) for k in range(field.ndim))
            setattr(array, member, cgutils.pack_array(builder, [_invariant(builder, one) for one in each]))
        elif context.enable_nrt or member not in ("meminfo", "parent"):
            setattr(array, member, _invariant(builder, cgutils.gep_inbounds(builder, place, 0, number)))
    return array._getvalue()


def _invariant(builder: Any, place: Any) -> Any:
    loaded = builder.load(place)
    loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
    return loaded


@unbox(ByAddress)
def _unpack(kind: ByAddress, value: Any, c: Any) -> NativeValue:
    ends = _places(kind)
    room = cgutils.alloca_once(c.builder, ir.ArrayType(ir.IntType(8 * WORD), ends[-1]))
    address = c.builder.bitcast(room, cgutils.voidptr_t)
    failed = cgutils.false_bit
    kept = []
    for number, field in enumerate(kind.fields):
        native = c.unbox(field, c.pyapi.tuple_getitem(value, number))
        place = cgutils.pointer_add(c.builder, address, ends[number] * WORD, native.value.type.as_pointer())
        c.builder.store(native.value, place)
        failed = c.builder.or_(failed, native.is_error)
        kept.append((field, native))

    def release() -> None:
        for field, native in reversed(kept):
            if native.cleanup is not None:
                native.cleanup()
            if c.context.enable_nrt:
                c.context.nrt.decref(c.builder, field, native.value)

    return NativeValue(address, is_error=failed, cleanup=release)
