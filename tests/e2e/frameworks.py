"""Frameworks on top of OpenAI's API, as their users call them.  tests/e2e/test_frameworks.py runs each function with the Python
of deps/clients.lock: ``python frameworks.py NAME URL KEY``.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any, Literal

import pydantic

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the Internet for prices
warnings.simplefilter("ignore")

ASKED = [{"role": "user", "content": "Tell me of Paris."}]
MORE: dict[str, Any] = {"temperature": 0, "max_tokens": 160}


class City(pydantic.BaseModel):
    name: Literal["Paris", "Rome"]
    is_capital: bool


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def langchain(url: str, key: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="chat", base_url=url, api_key=key, max_retries=0, **MORE)  # type: ignore[arg-type]
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(City, method=method).invoke("Paris?"), City)
    found: Any = model.with_structured_output(None, method="json_mode").invoke('Say {"a": 1}, as JSON.')
    assert isinstance(found, dict)
    (call, *_) = model.bind_tools([add], tool_choice="any").invoke("Add 3 and 4.").tool_calls
    assert (call["name"], set(call["args"])) == ("add", {"a", "b"})
    assert "".join(str(c.content) for c in model.stream("Hi."))


def instructor(url: str, key: str) -> None:
    import instructor
    import openai

    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
        made = instructor.from_openai(client, mode=mode)
        city = made.create(model="chat", response_model=City, messages=ASKED, max_retries=0, **MORE)  # type: ignore[arg-type]
        assert isinstance(city, City), mode


def litellm(url: str, key: str) -> None:
    import litellm

    more: Any = {"model": "openai/chat", "api_base": url, "api_key": key, "messages": ASKED, **MORE}
    City.model_validate_json(litellm.completion(response_format=City, **more).choices[0].message.content)
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "double", "parameters": parameters}}]
    (call, *_) = litellm.completion(tools=tools, tool_choice="required", **more).choices[0].message.tool_calls
    assert call.function.name == "double"
    more["max_tokens"] = 8
    assert "".join(c.choices[0].delta.content or "" for c in litellm.completion(stream=True, **more))


def llm(url: str, key: str) -> None:
    from llm.default_plugins.openai_models import Chat

    model = Chat("thaw", model_name="chat", api_base=url, supports_tools=True, supports_schema=True)
    model.key = key
    City.model_validate_json(model.prompt("Paris?", schema=City, stream=False, **MORE).text())
    answer = model.prompt("Add 3 and 4.", tools=[add], **MORE)  # the model may, and need not, call it
    assert answer.text() or answer.tool_calls()


if __name__ == "__main__":
    {f.__name__: f for f in (langchain, instructor, litellm, llm)}[sys.argv[1]](*sys.argv[2:])
