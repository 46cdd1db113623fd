# SPDX-License-Identifier: Apache-2.0
"""How Sphinx makes the documentation. It needs no network unless ``AGENTSANDBOX_DOCS_ONLINE`` is set."""

from __future__ import annotations

import os
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

import agentsandbox
from agentsandbox import errors

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "agentsandbox"
author = "The agentsandbox authors"
copyright = author  # noqa: A001
release = metadata.version("agentsandbox")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = True
# What other projects document is not ours to resolve offline; every reference to our own names must lead somewhere.
nitpick_ignore_regex = [(r"py:.*", r"(?!agentsandbox).*")]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
add_module_names = False

doctest_global_setup = "from agentsandbox import *"

smartquotes = False  # options are written with two hyphens

html_theme = "furo"
html_title = f"agentsandbox {release}"

if os.environ.get("AGENTSANDBOX_DOCS_ONLINE"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "anyio": ("https://anyio.readthedocs.io/en/stable/", None),
        "attrs": ("https://www.attrs.org/en/stable/", None),
    }


class CommandLine(SphinxDirective):
    """``{command-line} module:app`` documents every command of a typer application from the application itself."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Render the commands as Markdown and let the parser make nodes of it."""
        from typer.main import get_command

        module, _, name = self.arguments[0].partition(":")
        command = get_command(getattr(import_module(module), name))
        lines = "\n\n".join(render(command, "agentsandbox")).splitlines()
        container = nodes.container()
        self.state.nested_parse(StringList(lines, self.arguments[0]), self.content_offset, container, match_titles=True)
        return container.children


def render(command: Any, path: str) -> list[str]:
    """Describe a command, or a group and all commands in it, in Markdown."""
    if hasattr(command, "commands"):
        return [part for name, child in command.commands.items() for part in render(child, f"{path} {name}")]
    rows = []
    for parameter in command.params:
        if parameter.param_type_name == "option" and "--help" not in parameter.opts:
            default = "" if parameter.default in (None, False) else f"`{parameter.default}`"
            shown = "**required**" if parameter.required else default
            rows.append(f"| `{parameter.opts[-1]}` | {parameter.help or ''} | {shown} |")
    table = ["| option | meaning | default |\n|---|---|---|\n" + "\n".join(rows)] if rows else []
    return [f"## `{path}`", (command.help or "").strip(), *table]


def to_public_name(app: Sphinx, env: Any, node: Any, contnode: Any) -> Any:
    """Lead a reference to where a name is defined to where it is documented: ``agentsandbox.Name`` or ``errors``."""
    target = node.get("reftarget", "")
    name = target.rpartition(".")[2]
    if node.get("refdomain") != "py" or target.startswith("agentsandbox.errors."):
        return None
    if name in errors.__all__:
        public = f"agentsandbox.errors.{name}"
    elif name in agentsandbox.__all__:
        public = f"agentsandbox.{name}"
    else:
        return None
    if public == target:
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, contnode)


def setup(app: Sphinx) -> None:
    """Register what is above."""
    app.add_directive("command-line", CommandLine)
    app.connect("missing-reference", to_public_name)
