"""Recognize addresses of data sets, and remove secrets from them.

Covers: distinguishing an address from a path, removing what grants access.
Does not cover: reading a data set (``features.staging.source``).
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
# Parameters signed beside the path, under names that have other meanings elsewhere.
_SIGNED = re.compile(
    r"(expires|policy|s[eprtvs]|sip|spr|srt|sdd|ses|saoid|suoid|scid|skoid|sktid|skt|ske|sks|skv|rsc[cdelt])=",
    re.IGNORECASE,
)


def is_address(source: str) -> bool:
    """Whether fsspec reads it, and not the file system."""
    return "://" in source or "::" in source


def without_secrets(text: str) -> str:
    """Return a text whose addresses hold no secrets and stay the same when they are signed again.

    Passwords, the user name before a web server's name, which may stand for one, and parameters that sign a request are
    removed: those of S3, Azure, Google and CloudFront. Other parameters stay, as they may distinguish one data set from
    another.

    >>> without_secrets("https://me:secret@host/set.tar?version=2&sig=abc&se=2030")
    'https://host/set.tar?version=2'
    >>> without_secrets("abfs://container@account.dfs.core.windows.net/set")
    'abfs://container@account.dfs.core.windows.net/set'
    """
    return _QUERY.sub(_unsigned, _USER.sub(_unnamed, text))


def _unnamed(found: re.Match[str]) -> str:
    scheme, user = found["scheme"], found["user"]
    # Elsewhere it may be a part of the address: Azure's container, or the login name.
    return scheme if scheme.lower().startswith("http") or not user else f"{scheme}{user}@"


def _unsigned(found: re.Match[str]) -> str:
    parts = found["query"].split("&")
    kept = [part for part in parts if not _SIGNATURE.match(part)]
    if len(kept) < len(parts):
        kept = [part for part in kept if not _SIGNED.match(part)]
    return f"?{'&'.join(kept)}" if kept else ""
