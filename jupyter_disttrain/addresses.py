"""Addresses of data sets, as people type them and as others may read them.

Covers: telling an address from a path, leaving out what lets whoever reads it in.
Does not cover: reading one (``engine.stage_source``).
"""

from __future__ import annotations

import re

_USER = re.compile(
    r"\b(?P<scheme>[a-z][\w+.-]*://)(?P<user>[^\s/?#:'\"@]*)(?P<password>:[^\s/?#'\"]*)?@", re.IGNORECASE
)
_QUERY = re.compile(r"\?(?P<query>[^\s?#'\"<>)]+?)(?=::|[\s#'\"<>)]|$)")
_SIGNATURE = re.compile(
    r"(sig|signature|.*token|api_?key|x-(amz|goog|oss)-.*|awsaccesskeyid|googleaccessid|key-pair-id)=", re.IGNORECASE
)
# What is signed beside the path, under names that mean something else elsewhere.
_SIGNED = re.compile(
    r"(expires|policy|s[eprtvs]|sip|spr|srt|sdd|ses|saoid|suoid|scid|skoid|sktid|skt|ske|sks|skv|rsc[cdelt])=",
    re.IGNORECASE,
)


def is_address(source: str) -> bool:
    """Whether fsspec reads it, and not the file system."""
    return "://" in source or "::" in source


def without_secrets(text: str) -> str:
    """Return a text with its addresses as others may read them, and as they stay when they are signed anew.

    Left out are passwords, what stands for one before a web server's name, and parameters that sign a request: those of
    S3, Azure, Google and CloudFront. Other parameters stay, for they may tell one data set from another.

    Examples
    --------
    >>> without_secrets("https://me:secret@host/set.tar?version=2&sig=abc&se=2030")
    'https://host/set.tar?version=2'
    >>> without_secrets("abfs://container@account.dfs.core.windows.net/set")
    'abfs://container@account.dfs.core.windows.net/set'
    """
    return _QUERY.sub(_unsigned, _USER.sub(_unnamed, text))


def _unnamed(found: re.Match[str]) -> str:
    scheme, user = found["scheme"], found["user"]
    # Elsewhere it may be a part of the address: Azure's container, or who logs in.
    return scheme if scheme.lower().startswith("http") or not user else f"{scheme}{user}@"


def _unsigned(found: re.Match[str]) -> str:
    parts = found["query"].split("&")
    kept = [part for part in parts if not _SIGNATURE.match(part)]
    if len(kept) < len(parts):
        kept = [part for part in kept if not _SIGNED.match(part)]
    return f"?{'&'.join(kept)}" if kept else ""
