"""…/rules: join a trigger to an action, switch that off and on, take it away.

A rule and its trigger's link to it are written in one step (Entities.swap), so that they never disagree.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from flask import Blueprint, Response

from gateway.api.http import entity_name, gateway, json_response, namespace, takes
from gateway.api.openwhisk.action_body import Json, malformed, next_version
from gateway.api.openwhisk.entity_body import body_bytes, common, entity_body, listed, may_write, noted, published
from gateway.api.openwhisk.triggers import path_and_name
from gateway.serving.actions.packages import qualified
from relay.state.entities import Change, Row
from thaw.clock import wall_ms
from thaw.entities import Rule, RuleLink, RuleStatus, Trigger
from thaw.errors import BadRequest, NotFound, TooLarge
from thaw.ids import ActionName, Namespace, is_entity_name

blueprint = Blueprint("rules", __name__, url_prefix="/api/v1/namespaces/<ns>/rules")
_MOST_RULES: Final = 64
"""A trigger has at most so many: its row is read at every firing, which makes a call for each."""


@blueprint.get("")
def list_rules(ns: str) -> Response:
    own = namespace(ns)
    triggers = {trigger.name: trigger for trigger in gateway().entities.all(Trigger, own)}
    found = gateway().entities.all(Rule, own)
    return json_response(listed("rules", [_entity(rule, _status(rule, triggers.get(rule.trigger))) for rule in found]))


@blueprint.get("/<rule>")
def get_rule(ns: str, rule: str) -> Response:
    found = gateway().entities.get(Rule, namespace(ns), entity_name(rule)).entity
    return json_response(_entity(found, _status(found, _trigger(found))))


@blueprint.put("/<rule>")
@takes(body_bytes)
def put_rule(ns: str, rule: str) -> Response:
    """A new rule is active; a changed one keeps its status."""
    own, body = namespace(ns), entity_body()
    was = gateway().entities.find(Rule, own, entity_name(rule))
    may_write(was)
    becomes = _changed(was, own, rule, body)
    status = RuleStatus.ACTIVE if was is None else _status(was.entity, _trigger(was.entity))
    changes = [Change(was, becomes), _linked(becomes, status)]
    if was is not None and was.entity.trigger != becomes.trigger:
        changes += _unlinked(was.entity)
    gateway().entities.swap(*changes)
    return json_response(_entity(becomes, status))


@blueprint.post("/<rule>")
def set_status(ns: str, rule: str) -> Response:
    own, wanted = namespace(ns), entity_body().get("status")
    if wanted not in tuple(RuleStatus):
        raise malformed(f"status must be active or inactive, not {wanted!r:.80}")
    status = RuleStatus(wanted)
    found = gateway().entities.get(Rule, own, entity_name(rule)).entity
    if status is RuleStatus.ACTIVE or _trigger(found) is not None:
        gateway().entities.swap(_linked(found, status))
    return json_response(_entity(found, status))


@blueprint.delete("/<rule>")
def delete_rule(ns: str, rule: str) -> Response:
    was = gateway().entities.get(Rule, namespace(ns), entity_name(rule))
    status = _status(was.entity, _trigger(was.entity))
    gateway().entities.swap(Change(was, None), *_unlinked(was.entity))
    return json_response(_entity(was.entity, status))


def _changed(was: Row[Rule] | None, own: Namespace, name: str, body: Json) -> Rule:
    """Raises BadRequest for a trigger or an action that is not there."""
    if was is None and not ("trigger" in body and "action" in body):
        raise malformed("a rule needs a trigger and an action")
    old = Rule(own, name, "", ActionName("")) if was is None else was.entity
    trigger = _named_trigger(body["trigger"], own) if "trigger" in body else old.trigger
    action = _named_action(body["action"], own) if "action" in body else old.action
    version = old.version if was is None else next_version(old.version, body.get("version"))
    changed = replace(old, trigger=trigger, action=action, version=version, updated_ms=wall_ms())
    return replace(changed, annotations=noted(old, body), publish=published(old, body))


def _named_trigger(plain: Any, own: Namespace) -> str:
    """``/ns/trigger`` or ``trigger``, in the rule's own namespace."""
    text = _text(plain, "trigger")
    namespace_named, name = text[1:].split("/", 1) if text.startswith("/") and "/" in text[1:] else ("_", text)
    if namespace_named not in ("_", own) or not is_entity_name(name):
        raise malformed("trigger must be the name of a trigger in the rule's own namespace")
    return name


def _named_action(plain: Any, own: Namespace) -> ActionName:
    name = qualified(_text(plain, "action"), own)
    try:
        gateway().packages.target(name, own)
    except NotFound:
        raise BadRequest(f"/{name} does not exist.") from None
    return name


def _text(plain: Any, field: str) -> str:
    """A name as text, or as the object of path and name in which it is given back."""
    if isinstance(plain, dict) and isinstance(plain.get("path"), str) and isinstance(plain.get("name"), str):
        return f"/{plain['path'].strip('/')}/{plain['name']}"
    if not isinstance(plain, str):
        raise malformed(f"{field} must be a name")
    return plain


def _trigger(rule: Rule) -> Trigger | None:
    row = gateway().entities.find(Trigger, rule.namespace, rule.trigger)
    return None if row is None else row.entity


def _status(rule: Rule, trigger: Trigger | None) -> RuleStatus:
    link = None if trigger is None else trigger.rules.get(rule.name)
    return RuleStatus.INACTIVE if link is None else link.status


def _linked(rule: Rule, status: RuleStatus) -> Change:
    """The trigger with this rule.  Raises BadRequest, TooLarge."""
    row = gateway().entities.find(Trigger, rule.namespace, rule.trigger)
    if row is None:
        raise BadRequest(f"/{rule.namespace}/{rule.trigger} does not exist.")
    links = {**row.entity.rules, rule.name: RuleLink(rule.action, status)}
    if len(links) > _MOST_RULES and rule.name not in row.entity.rules:
        raise TooLarge(f"The trigger has {len(row.entity.rules)} rules, and {_MOST_RULES} are allowed.")
    return Change(row, replace(row.entity, rules=links))


def _unlinked(rule: Rule) -> list[Change]:
    """The trigger without this rule; nothing if there is no such trigger, or if it has no link."""
    row = gateway().entities.find(Trigger, rule.namespace, rule.trigger)
    if row is None or rule.name not in row.entity.rules:
        return []
    links = {name: link for name, link in row.entity.rules.items() if name != rule.name}
    return [Change(row, replace(row.entity, rules=links))]


def _entity(rule: Rule, status: RuleStatus) -> dict[str, Any]:
    trigger = path_and_name(f"{rule.namespace}/{rule.trigger}")
    return {**common(rule), "status": status, "trigger": trigger, "action": path_and_name(rule.action)}
