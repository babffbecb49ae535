"""Four hosts behind slow links, with the small real model in float32, and actions that tests deploy and remove."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.machine import Machine, text_of
from tests.e2e.pipelines import Pipelines, wait_gone
from thaw.dev.known_answers import FRANCE

PROMPTS = (FRANCE.prompt, "Count from one to thirty.")
ANSWER = {"temperature": 0, "max_tokens": 24, "stream": True, "ignore_eos": True}


class Fleet(Machine):
    """Four hosts behind links of 200 Mbit/s, the small real model, and actions that tests make as they need them."""

    directory: Path
    pipelines: Pipelines

    def deploy(self, name: str, *, transport: str = "auto", **changes: dict[str, Any]) -> None:
        config = json.loads(Path("examples/chat/chat.json").read_text()) | {"transport": transport}
        config["engine"]["dtype"] = "float32"
        config["resources"]["gpu_memory_mb"] = 3072
        for section, values in changes.items():
            config[section] |= values
        path = self.directory / f"{name}.json"
        path.write_text(json.dumps(config))
        self.thaw("action", "update", name, "--config", str(path))

    def answers(self, action: str) -> tuple[list[str], str]:
        """Return the answers to all prompts, and the id of the first activation."""
        responses = [self.chat(action, prompt, **ANSWER) for prompt in PROMPTS]
        return [text_of(r) for r in responses], responses[0].headers["X-Openwhisk-Activation-Id"]

    def remove(self, action: str) -> None:
        """Delete the action.  Return when nothing of its groups is left."""
        groups = {c.record.group_id for c in self.pipelines.containers(action)}
        self.thaw("action", "delete", action)
        wait_gone(lambda: self.pipelines.leftovers(groups))
        wait_gone(lambda: [str(c) for c in self.pipelines.containers(action)])
