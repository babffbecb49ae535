"""Entities and records as OpenWhisk's clients read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.serving.actions.action_cache import simple_name
from gateway.serving.deploying.preflight import Verdict
from gateway.serving.routing.routes import Serving
from thaw import wire
from thaw.action import KIND_SEQUENCE, REFUSED, UNCHECKED, Action
from thaw.activation import Activation
from thaw.requirements import without_hashes

Json = dict[str, Any]


def pairs(values: Mapping[str, object]) -> list[Json]:
    return [{"key": k, "value": v} for k, v in values.items()]


def parameters(entity: Action) -> list[Json]:
    """With OpenWhisk's mark of those that are for the init alone."""
    return [*pairs(entity.parameters), *({**p, "init": True} for p in pairs(entity.init_parameters))]


def action(entity: Action, *, code: bool = True, serving: Sequence[Serving] | None = None) -> Json:
    """The whole entity; ``config`` and, where it is known, what serves it are Thaw's additions for LLM kinds."""
    exec_: Json = {"kind": entity.exec.kind, "binary": entity.exec.binary}
    if entity.is_sequence:
        exec_["components"] = [f"/{name}" for name in entity.exec.components]
    if code:
        exec_["code"] = entity.exec.code
    if entity.exec.image:
        exec_["image"] = entity.exec.image
    if entity.exec.packages:
        exec_["packages"] = [without_hashes(line) for line in entity.exec.packages]
    if entity.exec.main:
        exec_["main"] = entity.exec.main
    rendered = {**_common(entity), "exec": exec_, "parameters": parameters(entity)}
    if entity.config is not None:
        rendered["config"] = wire.to_plain(entity.config)
        if serving is not None:
            rendered["instances"] = [_instance(each) for each in serving]
    return rendered


def _instance(serving: Serving) -> Json:
    """A group is one instance.  ``becoming``: the number of workers that it will be."""
    record = serving.record
    becoming = {"becoming": serving.n_workers} if record.is_consolidating else {}
    where = {"host": record.host_id, "groupId": record.group_id, "modelVersion": record.model_version}
    return {"stages": record.n_stages, **becoming, "slots": record.slots, **where}


def preflight(verdict: Verdict, *, later: bool = False) -> Json:
    """Thaw's addition.  ``checked``: the engine has looked.  There is a refusal if the deploy was forced, or if nothing
    is deployed.  ``later``: what is unchecked will be checked."""
    refusal, found = verdict.refusal, verdict.found
    rendered: Json = {"checked": not verdict.unchecked}
    if verdict.unchecked:
        rendered["reason"] = verdict.unchecked
        rendered |= {"later": True} if later else {}
    if refusal is not None:
        rendered["refusal"] = {"code": refusal.code, "message": refusal.message, "hint": refusal.hint}
    if found is not None:
        rendered |= {"model": found.uri, "modelVersion": found.model_version, "notes": list(found.notes)}
    if found is not None and found.engine:
        rendered |= {"engine": found.engine, "maxModelLen": found.max_model_len}
    return rendered


def action_summary(entity: Action) -> Json:
    return {**_common(entity), "exec": {"binary": entity.exec.binary}}


def _common(entity: Action) -> Json:
    return {
        "namespace": entity.name.rpartition("/")[0],
        "name": simple_name(entity.name),
        "version": entity.version,
        "publish": entity.publish,
        "annotations": pairs({**entity.annotations, **_check(entity)}),
        "limits": wire.to_plain(entity.limits),
        "updated": entity.updated_ms,
    }


def _check(entity: Action) -> Json:
    """What a client cannot write: the check of a model that was deployed before its engine could look, or by force."""
    found = {UNCHECKED: entity.unchecked, REFUSED: entity.refusal and f"would not start: {entity.refusal}"}
    return {name: said for name, said in found.items() if said}


def activation_summary(record: Activation) -> Json:
    return {
        "namespace": record.namespace,
        "name": simple_name(record.action),
        "version": record.action_version,
        "subject": record.subject,
        "activationId": record.activation_id,
        "start": record.start_ms,
        "end": record.end_ms,
        "duration": record.end_ms - record.start_ms,
        "statusCode": record.status.value,
        "publish": False,
        "annotations": pairs(_annotations(record)),
        **({"cause": record.cause} if record.cause else {}),
    }


def activation(record: Activation) -> Json:
    return {**activation_summary(record), "logs": list(record.logs), "response": response(record)}


def response(record: Activation) -> Json:
    return {
        "status": record.status.text,
        "statusCode": record.status.value,
        "success": record.status.value == 0,
        "result": record.result,
    }


def result(record: Activation) -> Json:
    """The answer of ``…/activations/{id}/result``."""
    return {"result": record.result, "status": record.status.text, "success": record.status.value == 0}


def _annotations(record: Activation) -> Json:
    """OpenWhisk's, then Thaw's: how it started, where, and an LLM's tokens and seed."""
    found: Json = {
        "path": record.action,
        "kind": record.kind,
        "limits": dict(record.limits),
        "timeout": record.timed_out,
        "waitTime": record.wait_ms,
        "initTime": record.init_ms,
        "topmost": True if record.kind == KIND_SEQUENCE and not record.caused_by else None,
        "causedBy": record.caused_by or None,
        "binding": record.binding or None,
        "startMode": record.start_mode or None,
        "host": record.host or None,
        "groupId": record.group_id or None,
        "modelVersion": record.model_version or None,
        "seed": record.seed,
        "usage": dict(record.usage) or None,
    }
    return {k: v for k, v in found.items() if v is not None}
