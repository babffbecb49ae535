"""Tools of a chat: their description in the prompt, the grammar of the answer, and the calls that are read from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from relay.protocol.messages import CallDelta, LlmRun
from tests.thaw_runtime.models import write_tiny_model
from thaw.errors import BadParameter, BadRequest
from thaw_runtime.engine.protocol import GrammarKind
from thaw_runtime.llm.chat_template import ChatTemplate
from thaw_runtime.llm.model_text import ModelText
from thaw_runtime.llm.openai_request import parse_run
from thaw_runtime.llm.tools import HERMES, LLAMA3_JSON, CallStream, ToolFormat, tool_use

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD: Any = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": NUMBERS}}
SUB: Any = {"type": "function", "function": {"name": "sub", "parameters": NUMBERS}}
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
KNOWING = PLAIN + "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEXTS = [
    ("Just text with { and < and <tool", "Just text with { and < and <tool", []),
    (CALL, "", [("add", {"a": 1})]),
    ("I add.\n" + CALL, "I add.\n", [("add", {"a": 1})]),
    (f"{CALL}\n{CALL} done", "done", [("add", {"a": 1})] * 2),
    (
        '<tool_call>\n{"name": "say", "arguments": {"t": "a } \\"}\\n</tool_call> {", "l": [{}]}}\n</tool_call>',
        "",
        [("say", {"t": 'a } "}\n</tool_call> {', "l": [{}]})],
    ),
]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("tojson", '{"b": "é<", "a": [1, 2]}'),
        ("tojson(ensure_ascii=True)", '{"b": "\\u00e9<", "a": [1, 2]}'),
        ("tojson(ensure_ascii=False, sort_keys=True)", '{"a": [1, 2], "b": "é<"}'),
        ("tojson(separators=(',', ':'))", '{"b":"é<","a":[1,2]}'),
        ("tojson(indent=1)", '{\n "b": "é<",\n "a": [\n  1,\n  2\n ]\n}'),
    ],
)
def test_a_template_writes_json_with_the_options_that_transformers_has(how: str, said: str) -> None:
    assert ChatTemplate(f"{{{{ value | {how} }}}}", {}).render([], {"value": {"b": "é<", "a": [1, 2]}}) == said


@pytest.mark.parametrize(
    "loop",
    [
        "message['content'] | selectattr('type', 'equalto', 'text')",
        "message.content",
        "message['content'] | rejectattr('type', 'equalto', 'image')",
    ],
)
def test_a_template_that_goes_over_the_parts_of_a_message_gets_its_text_as_parts(loop: str) -> None:
    source = (
        f"{{% for message in messages %}}<{{% for part in {loop} %}}{{{{ part['text'] }}}}{{% endfor %}}>{{% endfor %}}"
    )
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": None}, {"role": "user", "content": ""}]
    said.append({"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "three"}]})
    assert ChatTemplate(source, {}).render(said, {}) == "<one><><><twothree>"
    assert ChatTemplate(source, {}).render_open(said[:1], {}) == "<one"


GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
)


def test_a_template_without_a_system_role_is_told_of_tools_by_the_user_and_takes_two_results() -> None:
    template = ChatTemplate(GEMMA, {})
    asked = {"role": "user", "content": "Add."}
    told = template.render([asked], {}, [ADD])
    assert told.startswith("<user>")
    assert told.endswith("\n\nAdd.")
    assert '"name": "add"' in told
    calls = [{"id": n, "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}} for n in "ab"]
    results = [{"role": "tool", "tool_call_id": n, "content": n} for n in "ab"]
    said = [
        asked,
        {"role": "assistant", "content": None, "tool_calls": calls},
        *results,
        {"role": "user", "content": "So?"},
    ]
    assert template.render(said, {}, [ADD]).count("<user>") == 2
    assert template.render(said, {}, [ADD]).endswith("<tool_response>\nb\n</tool_response>\nSo?")
    with pytest.raises(BadRequest, match="System role not supported"):
        template.render([{"role": "system", "content": "x"}, asked], {})


def read(form: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, Any]], list[CallDelta]]:
    """The text of an answer that comes in these pieces, its calls, and the parts in which they came."""
    stream, shown, parts = CallStream(form), "", list[CallDelta]()
    for piece in pieces:
        found = stream.push(piece)
        shown, parts = shown + found.text, parts + list(found.calls)
    shown += stream.flush()
    calls: list[tuple[str, str]] = []
    for part in parts:
        if part.index == len(calls):
            calls.append((part.name, ""))
        calls[part.index] = (calls[part.index][0], calls[part.index][1] + part.arguments)
    assert len(calls) == stream.n_calls
    return shown, [(name, json.loads(arguments)) for name, arguments in calls], parts


@pytest.mark.parametrize(("text", "shown", "calls"), TEXTS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_read_from_the_text_however_it_is_cut(text: str, shown: str, calls: Any, size: int) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert read(HERMES, pieces)[:2] == (shown, calls)


def test_calls_in_llamas_form_are_read() -> None:
    text = '{"name": "add", "parameters": {"a": 1}}; {"name": "sub", "parameters": {"a": {"b": "}"}}}'
    assert read(LLAMA3_JSON, list(text))[:2] == ("", [("add", {"a": 1}), ("sub", {"a": {"b": "}"}})])
    assert read(LLAMA3_JSON, list('{"a": 1}'))[:2] == ('{"a": 1}', [])


def test_a_call_is_shown_as_it_comes() -> None:
    _, _, parts = read(HERMES, list(CALL))
    assert parts[0] == CallDelta(0, "add", "")
    assert [p.arguments for p in parts[1:]] == list('{"a": 1}')


def test_a_call_that_was_cut_off_is_shown_as_far_as_it_came() -> None:
    stream = CallStream(HERMES)
    found = stream.push(CALL[: CALL.index(": 1}")])
    assert (found.text, "".join(p.arguments for p in found.calls), stream.flush()) == ("", '{"a"', "")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"tool_choice": "required"}, "tags_with_separator"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tags_with_separator"),
        ({}, "triggered_tags"),
        ({"tool_choice": "auto", "response_format": {"type": "json_object"}}, "or"),
    ],
)
def test_an_answer_that_may_call_tools_has_their_form(body: dict[str, Any], kind: str) -> None:
    use = tool_use({"tools": [ADD, SUB], **body}, HERMES)
    assert use.grammar is not None
    assert (use.grammar.kind, use.grammar.param) == (GrammarKind.STRUCTURAL_TAG, "tools")
    assert json.loads(use.grammar.text)["format"]["type"] == kind
    assert use.offered == (ADD, SUB)
    assert use.is_named is isinstance(body.get("tool_choice"), dict)
    assert ('"name\\": \\"add\\"' not in use.grammar.text) is use.is_named


@pytest.mark.parametrize(("choice", "single"), [("auto", False), ("required", False), ("auto", True)])
def test_calls_come_one_by_one_if_the_request_says_so(choice: str, single: bool) -> None:
    use = tool_use({"tools": [ADD], "tool_choice": choice, "parallel_tool_calls": not single}, HERMES)
    assert use.grammar is not None
    assert json.loads(use.grammar.text)["format"]["stop_after_first"] is single


def test_tools_that_may_not_be_called_are_not_offered() -> None:
    use = tool_use({"tools": [ADD], "tool_choice": "none", "response_format": {"type": "json_object"}}, HERMES)
    assert (use.offered, use.format) == ((), None)
    assert use.grammar is not None
    assert use.grammar.kind is GrammarKind.JSON


def test_arguments_are_an_object_and_their_schemas_have_the_names_of_their_parameters() -> None:
    add = {"type": "function", "function": {"name": "add", "parameters": {"properties": {}}}}
    use = tool_use({"tools": [SUB, add], "response_format": {"type": "json_object"}}, HERMES)
    assert use.grammar is not None
    assert use.grammar.schema_params == (
        "response_format",
        "tools[0].function.parameters",
        "tools[1].function.parameters",
    )
    named = {"type": "function", "function": {"name": "add"}}
    use = tool_use({"tools": [SUB, add], "tool_choice": named}, HERMES)
    assert use.grammar is not None
    (tag,) = json.loads(use.grammar.text)["format"]["tags"]
    assert tag["content"]["json_schema"] == {"type": "object", "properties": {}}
    assert use.grammar.schema_params == ("tools[1].function.parameters",)


def test_what_tools_cannot_go_with_is_refused_by_its_name() -> None:
    with pytest.raises(BadParameter, match="guided_regex: "):
        tool_use({"tools": [ADD], "guided_regex": "a"}, HERMES)
    with pytest.raises(BadParameter, match="tool_choice: this model's template") as caught:
        tool_use({"tools": [ADD]}, None)
    assert "engine.tool_parser" in caught.value.hint


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (PLAIN, HERMES),
        (KNOWING + "<tool_call>", HERMES),
        (KNOWING + '{"name": function name, "parameters": dictionary}', LLAMA3_JSON),
        (KNOWING + "[TOOL_CALLS]", None),
        (KNOWING + "<tool_call><function=", None),
    ],
)
def test_the_form_of_calls_is_read_from_the_template(source: str, form: ToolFormat | None) -> None:
    assert ChatTemplate(source, {}).tool_format == form


def history() -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    return [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]


def test_a_template_without_tools_reads_of_them_in_words() -> None:
    prompt = ChatTemplate(PLAIN, {}).render(history(), {}, [ADD])
    system, _, rest = prompt.partition("<user>")
    assert system.startswith("<system>You can call functions.")
    assert json.dumps(ADD) in system
    assert rest == f"add<assistant>{CALL}<user><tool_response>\n2\n</tool_response><assistant>"
    said = [{"role": "system", "content": "Be kind."}, *history()]
    assert ChatTemplate(PLAIN, {}).render(said, {}, [ADD]).startswith("<system>Be kind.\n\nYou can call")


def test_a_template_with_tools_gets_them_and_arguments_as_an_object() -> None:
    calls = "{% for m in messages if m.tool_calls %}{{ m.content }}{{ m.tool_calls[0].function.arguments.a + 1 }}{% endfor %}"
    assert ChatTemplate(calls + "{{ tools[0].function.name }}", {}).render(history(), {}, [ADD]) == "2add"


def test_arguments_that_are_not_json_are_none_at_all() -> None:
    """The model wrote them, and they stay in the history: a refusal would end the conversation."""
    said = history()
    said[1]["tool_calls"][0]["function"]["arguments"] = "{"
    assert '"arguments": {}' in ChatTemplate(PLAIN, {}).render(said, {})


def test_a_developers_message_is_the_systems_for_a_template_that_does_not_know_it() -> None:
    said = [{"role": "developer", "content": "x"}]
    assert ChatTemplate(PLAIN, {}).render(said, {}) == "<system>x<assistant>"
    assert ChatTemplate("{# 'developer' #}" + PLAIN, {}).render(said, {}) == "<developer>x<assistant>"


def test_an_answer_goes_on_with_the_last_message() -> None:
    said = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two "}]
    template = ChatTemplate(PLAIN + "{% if add_generation_prompt %}!{% endif %}", {})
    assert template.render_open(said, {"add_generation_prompt": False}) == "<user>count<assistant>one two "
    with pytest.raises(BadParameter, match="continue_final_message"):
        ChatTemplate("{{ messages[-1].content | upper }}", {}).render_open(said, {})


def test_an_answer_goes_on_with_words_that_the_template_has_too() -> None:
    template = ChatTemplate("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}", {})
    assert template.render_open([{"role": "assistant", "content": "im"}], {}) == "<|im_start|>im"


def test_a_request_says_whether_its_answer_goes_on_with_a_message(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_tiny_model(tmp_path / "m") / "tokenizer.json"))
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<new>{% endif %}"
    text = ModelText(tokenizer, ChatTemplate(source, {}), (256,), 257, {})
    said = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two"}]

    def prompt(**body: Any) -> str:
        run = LlmRun("chat", {"messages": said, **body}, 0)
        return str(tokenizer.decode(parse_run(run, "r", text, 512).engine.prompt_token_ids))

    history = "<user>count</><assistant>one two"
    assert prompt() == prompt(add_generation_prompt=True) == f"{history}</><new>"
    assert prompt(add_generation_prompt=False) == f"{history}</>"
    assert prompt(continue_final_message=True) == prompt(continue_final_message=True, add_generation_prompt=False)
    assert prompt(continue_final_message=True) == history
