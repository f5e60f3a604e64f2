"""Ed25519 signatures, by the package ``cryptography``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jitkern.errors import CacheError

_DOMAIN = b"jitkern bundle manifest\n"  # so that a signature over something else can never be one over a bundle


def sign(text: bytes, key: Path) -> bytes:
    """The signature of a text.

    Args:
        text: what is signed.
        key: a file with the private key (PEM, no password).

    Raises:
        CacheError: the key or the package is missing.
    """
    signature: bytes = _load(key, private=True).sign(_DOMAIN + text)
    return signature


def matches(text: bytes, signature: bytes, key: Path) -> bool:
    """Whether a signature of a text was made with the private half of a public key (PEM).

    Raises:
        CacheError: the key or the package is missing.
    """
    public = _load(key, private=False)
    from cryptography.exceptions import InvalidSignature

    try:
        public.verify(signature, _DOMAIN + text)
    except InvalidSignature:
        return False
    return True


def _load(path: Path, private: bool) -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise CacheError('signed bundles need the package cryptography. Run: pip install "jitkern[bundle]"') from None
    wanted: Any = ed25519.Ed25519PrivateKey if private else ed25519.Ed25519PublicKey
    kind = "private" if private else "public"
    try:
        data = path.read_bytes()
        load = serialization.load_pem_private_key
        key: Any = load(data, None) if private else serialization.load_pem_public_key(data)
    except (OSError, ValueError, TypeError) as error:
        raise CacheError(f"{path} is no {kind} key in PEM form without a password: {error}") from None
    if not isinstance(key, wanted):
        raise CacheError(f"{path} is no Ed25519 {kind} key; make one: openssl genpkey -algorithm ed25519 -out key.pem")
    return key
