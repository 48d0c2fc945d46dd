"""Write and read variables that are pickled already as they are.

Covers: entries of a checkpoint that are pickles, below the key ``OWN`` of the state dict.
Does not cover: which variables they are, how they are pickled (``rank``).

torch's own planners pickle an entry that is no tensor when it is written. A pickle in ``bytes`` would be pickled again,
in a protocol that encodes bytes as text: that takes several times as long, and half as much space again.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem, WriteItem

OWN = ".own"  # a name that no variable can have


class PickledOnceSavePlanner(DefaultSavePlanner):
    """Write the ``bytes`` below ``OWN`` as they are."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
        """Return what is written of an entry."""
        if self.mappings[write_item.index.fqn][0] == OWN:
            return io.BytesIO(object)
        return super().transform_object(write_item, object)


class PickledOnceLoadPlanner(DefaultLoadPlanner):
    """Read what is below ``OWN`` as ``bytes``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an entry that was read into the state dict."""
        path = self.mappings[read_item.dest_index.fqn]
        if path[0] == OWN:
            set_element(self.original_state_dict, path, value.getvalue())
        else:
            super().load_bytes(read_item, value)
