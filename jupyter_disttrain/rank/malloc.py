"""Set up the C library's malloc for processes that train."""

from __future__ import annotations

_LARGEST = (32 << 20) - (1 << 16)  # bytes: glibc's limit for the block below, less its header, rounded to pages


def keep_freed_memory() -> None:
    """Let malloc keep freed memory, 64 MB of it at the heap's end, and take blocks of up to 32 MB from it.

    With glibc's initial thresholds, a training step may return the memory of its tensors to the system and fetch it
    again, zeroed, in the next step; whether it does depends on what else is on the heap, so it varies from process to
    process. glibc raises both thresholds when a block of up to 32 MB is freed (mallopt(3), M_MMAP_THRESHOLD), unless
    the user has set one of them, e.g. by MALLOC_TRIM_THRESHOLD_. Forked processes inherit them, DataLoader workers too.
    """
    bytes(_LARGEST)  # is freed at once; its pages are never touched, because they are zero already
