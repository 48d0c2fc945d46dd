"""Compute digests of a variable's parts, so that ranks can be compared without sending the values.

Covers: taking models, optimizers and containers apart, a digest of each part, the numbers of one part.
Does not cover: comparing ranks (``client.cells.compare``).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import UnserializableValueError, UsageError
from ...protocol.serialization import dump_value

if TYPE_CHECKING:
    from collections.abc import Iterator

SHOWN = 60  # characters shown of a plain value
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def digests(value: Any) -> list[dict[str, Any]]:
    """Return path, kind and digest of each part of a value; the digest is None if the part can't be compared.

    Parts are the tensors of a model or an optimizer and the items of lists, tuples and dicts. A tensor that is sharded
    over ranks differs on each by design and gets no digest.
    """
    return [_describe(path, part) for path, part in _parts("", value)]


def numbers(value: Any, path: str) -> np.ndarray | None:
    """Return one part of a value as an array of numbers that can be subtracted; None if it is no array of numbers.

    Raises a UsageError if the part no longer exists.
    """
    for found, part in _parts("", value):
        if found == path:
            array = _array(part)
            if array is None or array.dtype.kind not in "biuf":
                return None
            # Large integers that differ by one may be the same float64.
            return array.astype(np.float64 if array.dtype.kind in "bf" else object)
    raise UsageError(f"{path or 'the value'} no longer exists on this rank")


def _parts(path: str, value: Any, within: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each part; ``within`` holds the ids of the enclosing containers."""
    state = getattr(value, "state_dict", None)
    if callable(state) and not isinstance(value, type):
        value = state()
    if not isinstance(value, (dict, list, tuple)) or not value or id(value) in within:
        yield path, value if id(value) not in within else "itself"
        return
    inner = (*within, id(value))
    if isinstance(value, dict):
        # Plain are names, also dotted ones, as in a state dict, whose first part is not a key itself.
        is_plain = all(
            isinstance(key, str) and (key.isidentifier() or key.partition(".")[0] not in value) for key in value
        )
        for key, each in value.items():
            name = f".{key}" if is_plain else f"[{key!r}]"
            yield from _parts(f"{path}{name}" if path or not is_plain else str(key), each, inner)
    else:
        for index, each in enumerate(value):
            yield from _parts(f"{path}[{index}]", each, inner)


def _describe(path: str, part: Any) -> dict[str, Any]:
    if _is_sharded(part):
        return {"path": path, "kind": "sharded", "digest": None}
    array = _array(part)
    if array is not None:
        shape = "x".join(map(str, array.shape)) or "scalar"
        kind = f"{shape} {str(part.dtype).removeprefix('torch.')}"
        data = np.ascontiguousarray(array).view(np.uint8).data if array.size else b""
        return {"path": path, "kind": kind, "digest": hashlib.sha256(data).hexdigest()}
    if isinstance(part, _PLAIN):
        text = repr(part)
        shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
        kind = f"{type(part).__name__} {shown}"
        return {"path": path, "kind": kind, "digest": hashlib.sha256(text.encode()).hexdigest()}
    if isinstance(part, (set, frozenset)):
        part = sorted(map(repr, part))  # the order of a set differs between processes
    try:
        pickled, buffers = dump_value(part)
    except UnserializableValueError:
        return {"path": path, "kind": "opaque", "digest": None}
    digest = hashlib.sha256(pickled)
    for buffer in buffers:
        digest.update(buffer)
    return {"path": path, "kind": type(part).__name__, "digest": digest.hexdigest()}


def _is_sharded(part: Any) -> bool:
    placements = getattr(part, "placements", None)  # only a DTensor has them
    return placements is not None and not all(placement.is_replicate() for placement in placements)


def _array(part: Any) -> np.ndarray | None:
    """Return a tensor or an array as a numpy array; None for anything else."""
    if isinstance(part, np.ndarray):
        return None if part.dtype.hasobject else part
    if getattr(part, "is_meta", True):  # no tensor, or one without data
        return None
    tensor = part.full_tensor() if hasattr(part, "placements") else part
    tensor = tensor.detach().cpu()
    if tensor.layout.__str__() != "torch.strided" or tensor.is_quantized:
        return None
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4:  # noqa: PLR2004  (numpy has no bfloat16)
        tensor = tensor.float()
    array: np.ndarray = tensor.resolve_conj().resolve_neg().numpy()
    return array
