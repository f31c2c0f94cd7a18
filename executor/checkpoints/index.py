"""The entries of a checkpoint by name, as JSON, and a reader that follows it.

Torch's ``.metadata`` is a pickle, which executes code when it is read. It is written so that other programs can read a
checkpoint with torch.distributed.checkpoint. Penstock reads ``entries.json`` instead::

    {"model/block.0.weight": {"dtype": "float32", "shape": [8, 8], "chunks": [
        {"offsets": [0, 0], "sizes": [8, 8], "file": "__0_0.distcp", "at": [0, 1536]}]},
     "options/block.0.weight": {"chunks": [{"file": "__0_0.distcp", "at": [1536, 1200]}]}}

``at``: first byte and number of bytes. An entry without a shape is a value as JSON text (``values``), which torch
keeps as a pickled ``str``. Files are read by ``torch.load(weights_only=True)``; anything but tensors and texts is
refused.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from penstock.executor.checkpoints.checkpoint import INDEX, Checkpoint
from penstock.executor.checkpoints.values import DTYPES, from_text

_MOST_DIMENSIONS = 64
"""The most dimensions of a tensor, as in torch's kernels."""


def index_text(metadata: Metadata) -> str:
    """Return the text of ``entries.json`` for the files that torch has written."""
    entries: dict[str, dict[str, Any]] = {}
    for name, one in metadata.state_dict_metadata.items():
        if isinstance(one, TensorStorageMetadata):
            entries[name] = {"dtype": str(one.properties.dtype).removeprefix("torch."), "shape": list(one.size)}
        else:
            entries[name] = {}
        entries[name]["chunks"] = []
    sizes = {
        (name, tuple(chunk.offsets)): list(chunk.sizes)
        for name, one in metadata.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
        for chunk in one.chunks
    }
    for index, info in metadata.storage_data.items():
        place: dict[str, Any] = {"file": info.relative_path, "at": [info.offset, info.length]}
        if index.offset is not None:
            offsets = tuple(index.offset)
            place = {"offsets": list(offsets), "sizes": sizes[index.fqn, offsets]} | place
        entries[index.fqn]["chunks"].append(place)
    return json.dumps(entries)


class EntryReader(FileSystemReader):
    """A reader of torch's files that follows ``entries.json``, and reads no other file."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.directory)
        self._checkpoint = checkpoint

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``entries.json``. Raises ValueError, TypeError or KeyError with the entry that is not valid."""
        entries = json.loads((self._checkpoint.directory / INDEX).read_text(encoding="utf-8"))
        metadata = Metadata({}, storage_data={}, storage_meta=StorageMeta(load_id=self.load_id))
        for name, entry in entries.items():
            try:
                self._add(metadata, name, entry)
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"the entry {name!r} of {INDEX} is not valid ({type(error).__name__}: {error})"
                ) from None
        return metadata

    def _add(self, metadata: Metadata, name: str, entry: Mapping[str, Any]) -> None:
        places: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        if "shape" not in entry:
            (chunk,) = entry["chunks"]
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = self._place(chunk)
            return
        shape, properties = _counts(entry["shape"]), TensorProperties(dtype=DTYPES[entry["dtype"]])
        chunks = [ChunkStorageMetadata(_counts(one["offsets"]), _counts(one["sizes"])) for one in entry["chunks"]]
        count = 0
        for chunk, described in zip(chunks, entry["chunks"], strict=True):
            ends = [at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            if any(end > size for end, size in zip(ends, shape, strict=True)):
                raise ValueError(f"a part ends at {ends}, beyond the shape {list(shape)}")
            place = self._place(described)
            needed = prod(chunk.sizes) * properties.dtype.itemsize
            if needed > place.length:
                raise ValueError(f"a part needs {needed} bytes, but has {place.length} in its file")
            count += prod(chunk.sizes)
            places[MetadataIndex(name, chunk.offsets)] = place
        if count != prod(shape):
            raise ValueError(f"its parts hold {count} of {prod(shape)} numbers")
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, shape, chunks)

    def _place(self, described: Mapping[str, Any]) -> _StorageInfo:
        """Return the place of an entry. ValueError for a file outside of the checkpoint, or beyond a file's end."""
        file, (start, length) = described["file"], _counts(described["at"])
        size = self._checkpoint.sizes.get(file)
        if size is None:
            raise ValueError(f"{file!r} is not a file of this checkpoint")
        if start + length > size:
            raise ValueError(f"it ends at byte {start + length} of {file!r}, which has {size} bytes")
        return _StorageInfo(file, start, length)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the entries of a plan. Raises ValueError for an entry that differs from ``entries.json``."""
        for file, items in self._by_file(plan):
            with (Path(self._checkpoint.directory) / file).open("rb") as stream:
                for item in items:
                    part = self._slice_file(stream, self.storage_data[item.storage_index])
                    if item.type == LoadItemType.BYTE_IO:
                        planner.load_bytes(item, io.BytesIO(part.read(-1)))
                    else:
                        self._copy(item, part, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _by_file(self, plan: LoadPlan) -> Iterator[tuple[str, list[ReadItem]]]:
        items: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        return iter(items.items())

    def _copy(self, item: ReadItem, part: Any, planner: LoadPlanner) -> None:
        name = item.storage_index.fqn
        tensor = torch.load(part, map_location="cpu", weights_only=True)
        if type(tensor) is not Tensor:
            raise ValueError(f"{name!r} is {_kind(tensor)} in its file, not a tensor")
        for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, offset, length)
        target = planner.resolve_tensor(item).detach()
        if (target.shape, target.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(f"{name!r} is {_shaped(tensor)} in its file, but {_shaped(target)} in {INDEX}")
        target.copy_(tensor)
        planner.commit_tensor(item, target)


class EntryPlanner(DefaultLoadPlanner):
    """A planner that reads values other than tensors as JSON text."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put the value of a text in place. Raises ValueError for a text in another form."""
        name = read_item.dest_index.fqn
        text = torch.load(value, map_location="cpu", weights_only=True)
        if not isinstance(text, str):
            raise ValueError(f"{name!r} is {_kind(text)} in its file, not a text")
        try:
            self.state_dict[name] = from_text(text)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{name!r} is not a value that Penstock writes ({type(error).__name__}: {error})"
            ) from None


def _counts(numbers: Any) -> Size:
    """Return a list of counts as a size. Raises ValueError for anything else."""
    if not isinstance(numbers, list) or len(numbers) > _MOST_DIMENSIONS:
        raise ValueError(f"{numbers!r:.80} is not a list of counts")
    if any(type(one) is not int or not 0 <= one < 1 << 63 for one in numbers):
        raise ValueError(f"{numbers!r:.80} contains a number that is not a count")
    return Size(numbers)


def _kind(value: Any) -> str:
    return f"a {type(value).__qualname__}"


def _shaped(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"
