# SPDX-License-Identifier: Apache-2.0
"""A throw-away certificate authority, by the ``openssl`` program."""

from __future__ import annotations

import ssl
import subprocess
from typing import TYPE_CHECKING

from agentsandbox.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["make"]

_CONFIG = """\
[req]
distinguished_name = name
prompt = no
[name]
CN = cluster double
[ca]
basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign,digitalSignature
subjectKeyIdentifier = hash
[server]
basicConstraints = critical,CA:FALSE
subjectAltName = IP:127.0.0.1,DNS:localhost
keyUsage = critical,digitalSignature,keyEncipherment
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""


def make(directory: Path) -> tuple[ssl.SSLContext, str]:
    """
    Make certificates.

    Args:
        directory: Where to keep them.

    Returns:
        What a server needs, and the path of the authority's certificate.

    Raises:
        ConfigurationError: If there is no ``openssl``.

    """
    (directory / "config").write_text(_CONFIG)
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made = ["-config", "config", "-extensions", "ca", "-days", "2", "-keyout", "ca.key", "-out", "ca"]
    signer = ["-CA", "ca", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
    signed = ["-extfile", "config", "-extensions", "server", "-out", "server"]
    steps = (
        ["req", "-x509", *key, *made],
        ["req", *key, "-config", "config", "-keyout", "server.key", "-out", "server.csr"],
        ["x509", "-req", "-in", "server.csr", *signer, *signed],
    )
    for step in steps:
        try:
            subprocess.run(["openssl", *step], cwd=directory, check=True, capture_output=True)  # noqa: S607 - wherever it is
        except FileNotFoundError:
            raise ConfigurationError("TLS of the cluster double needs the program 'openssl'") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "server", directory / "server.key")
    return context, str(directory / "ca")
