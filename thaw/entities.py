"""OpenWhisk's entities beside actions: packages and their bindings, triggers, and rules, which join them to actions."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from thaw.ids import ActionName, Namespace


@dataclass(frozen=True, slots=True)
class Binding:
    """The package that a binding stands for."""

    namespace: Namespace
    name: str


@dataclass(frozen=True, slots=True)
class Package:
    """``publish``: every namespace may read and call its actions.  A binding has no actions of its own."""

    namespace: Namespace
    name: str
    version: str = "0.0.1"
    parameters: Mapping[str, object] = field(default_factory=dict)
    annotations: Mapping[str, object] = field(default_factory=dict)
    publish: bool = False
    updated_ms: int = 0
    binding: Binding | None = None


class RuleStatus(enum.StrEnum):
    ACTIVE = "active"
    INACTIVE = "inactive"


@dataclass(frozen=True, slots=True)
class RuleLink:
    """A trigger's copy of the data of one of its rules, so that a firing reads one row."""

    action: ActionName
    status: RuleStatus


@dataclass(frozen=True, slots=True)
class Trigger:
    """``rules`` has the links by the rules' names.  They are in the trigger's own namespace."""

    namespace: Namespace
    name: str
    version: str = "0.0.1"
    parameters: Mapping[str, object] = field(default_factory=dict)
    annotations: Mapping[str, object] = field(default_factory=dict)
    publish: bool = False
    updated_ms: int = 0
    rules: Mapping[str, RuleLink] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rule:
    """Its status is in its trigger's link.  A rule whose trigger has no link to it is inactive."""

    namespace: Namespace
    name: str
    trigger: str
    action: ActionName
    version: str = "0.0.1"
    annotations: Mapping[str, object] = field(default_factory=dict)
    publish: bool = False
    updated_ms: int = 0
