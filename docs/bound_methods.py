"""For the API reference: ``init = _default.init`` in ``fleet/__init__.py`` is a function there."""

from __future__ import annotations

from typing import Any

from griffe import Attribute, Extension, Function, Module, Parameters

DEFAULT = "_default."


class BoundMethods(Extension):
    def on_package(self, *, pkg: Module, **_: Any) -> None:
        for name, member in list(pkg.members.items()):
            value = str(member.value) if isinstance(member, Attribute) else ""
            method = pkg[f"api.Fleet.{name}"] if value.startswith(DEFAULT) else None
            if isinstance(method, Function):
                function = Function(
                    name,
                    parameters=Parameters(*list(method.parameters)[1:]),
                    returns=method.returns,
                    docstring=method.docstring,
                    lineno=member.lineno,
                )
                pkg.set_member(name, function)
