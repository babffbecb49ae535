"""The settings and metrics pages and the manifest of ModelFunction, written from the code:
``python -m tests.reference_pages`` renews them.

This module is with the tests because it imports every component, which no component may do.
"""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import yaml

import fetchd.metrics
import fetchd.settings
import gateway.metrics
import gateway.scheduler.io.metrics
import gateway.scheduler.settings
import gateway.settings
import invoker.metrics
import invoker.model_port.settings
import invoker.settings
import thaw.kserve.settings
import thaw.kubernetes.crd
import thaw.kubernetes.settings
import thaw_runtime.engine.vllm.settings

DOCS = Path(__file__).parents[1] / "docs"
_SETTINGS = {
    "gateway": gateway.settings,
    "scheduler": gateway.scheduler.settings,
    "invoker": invoker.settings,
    "fetchd": fetchd.settings,
    "model port": invoker.model_port.settings,
    "container of a model": thaw_runtime.engine.vllm.settings,
    "operator (Kubernetes)": thaw.kubernetes.settings,
    "storage initializer (KServe)": thaw.kserve.settings,
}
_METRICS = {
    "gateway": gateway.metrics,
    "scheduler": gateway.scheduler.io.metrics,
    "invoker": invoker.metrics,
    "fetchd": fetchd.metrics,
}


def settings_page() -> str:
    parts = [
        "# Settings\n\nEnvironment variables, read once at start; a bad value is refused by name. Written from the code.\n"
    ]
    for component, module in _SETTINGS.items():
        (cls,) = {c for c in vars(module).values() if dataclasses.is_dataclass(c) and c.__module__ == module.__name__}
        hints = typing.get_type_hints(cls)
        parts.append(f"\n## {component}\n\n| variable | type | default | what it is |\n|---|---|---|---|\n")
        for field in dataclasses.fields(cls):
            default = "required" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
            name = getattr(hints[field.name], "__name__", str(hints[field.name]))
            parts.append(
                f"| `{field.metadata['variable']}` | {name.replace('|', 'or')} | {default} | {field.metadata['help']} |\n"
            )
    return "".join(parts)


def metrics_page() -> str:
    parts = [
        "# Metrics\n\nPrometheus text at `/metrics`: the gateway's on its port, a scheduler's at `THAW_SCHEDULER_BIND`, an invoker's on\n"
        "its data port, and behind those the host's fetchd's, which listens on no network. All ask for a bearer token,\n"
        "`THAW_METRICS_TOKEN` or the installation's; a gateway on loopback without that setting asks for none. Labels come from\n"
        "bounded sets. Written from the code.\n"
    ]
    for component, module in _METRICS.items():
        parts.append(f"\n## {component}\n\n| metric | type | labels | what it counts |\n|---|---|---|---|\n")
        for collector in module.REGISTRY._collector_to_names:
            for metric in collector.describe():
                suffix = "_total" if metric.type == "counter" else ""
                labels = ", ".join(getattr(collector, "_labelnames", ())) or "–"
                parts.append(f"| `{metric.name}{suffix}` | {metric.type} | {labels} | {metric.documentation} |\n")
    return "".join(parts)


def modelfunction_manifest() -> str:
    head = "# The config of a model as a resource: thaw/schema/function.json as Kubernetes takes it.  Written from the code.\n"
    return head + yaml.safe_dump(thaw.kubernetes.crd.definition(), sort_keys=False, width=120, allow_unicode=True)


PAGES = {
    "settings.md": settings_page,
    "metrics.md": metrics_page,
    "../deploy/kubernetes/operator/modelfunction.yaml": modelfunction_manifest,
}

if __name__ == "__main__":
    for name, write in PAGES.items():
        (DOCS / name).write_text(write())
