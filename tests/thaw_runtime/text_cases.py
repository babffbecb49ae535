"""Chat templates that use what templates can use, one feature each, with the requests that they are rendered for.

A case is a template (or the files that hold templates) and what of the request is not plain.  The templates are those of
test_text_conformance.py, which renders each with Thaw and with vLLM.
"""

from __future__ import annotations

from typing import Any, Final

Case = dict[str, Any]

USER: Final = {"role": "user", "content": "Hello <b> é"}
CHAT: Final = [
    {"role": "system", "content": " Be brief. "},
    USER,
    {"role": "assistant", "content": "Hi.\n"},
    {"role": "user", "content": "Add 1 and 2"},
]
PARTS: Final = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "one"}, {"type": "text", "text": ""}, {"type": "text", "text": "two"}],
    },
    {"role": "assistant", "content": ""},
    USER,
]
ADD: Final = {
    "function": {
        "parameters": {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}},
        "name": "add",
    },
    "type": "function",
}
MUL: Final = {"type": "function", "function": {"name": "mul", "description": "é < f", "strict": True}}


def calls(*arguments: Any) -> list[dict[str, Any]]:
    """A history in which the assistant called with these arguments, and each call was answered."""
    made = [
        {"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": a}}
        for n, a in enumerate(arguments)
    ]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": f"r{n}"} for n in range(len(arguments))]
    return [USER, {"role": "assistant", "content": None, "tool_calls": made}, *results]


def case(template: str, messages: list[Any] = CHAT, **others: Any) -> Case:
    return {"template": template, "messages": messages, **others}


def each(body: str) -> str:
    """A template that writes ``body`` for each message ``m``."""
    return "{% for m in messages %}" + body + "{% endfor %}"


PLAIN: Final = each("<{{ m.role }}>{{ m.content }}</>") + "{% if add_generation_prompt %}<assistant>{% endif %}"
ALL_TOOLS: Final = "{{ tools | tojson }}"
SHOWN: Final = "{{ m.content if m.content is string else 'parts:' ~ (m.content | tojson) }}"

LANGUAGE: Final = {
    "a loop over messages": case(PLAIN),
    "no generation prompt": case(PLAIN, variables={"add_generation_prompt": False}),
    "loop variables": case(
        each("{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex0 }};")
    ),
    "the neighbours of a message": case(
        each("{{ loop.previtem.role if loop.previtem is defined }}>{{ loop.nextitem.role if not loop.last }}|")
    ),
    "cycle and changed": case(each("{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}")),
    "break and continue": case(
        each(
            "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% if loop.index == 3 %}{% break %}{% endif %}"
        )
    ),
    "a loop with a condition and an else": case(
        "{% for m in messages if m.role == 'x' %}{{ m.content }}{% else %}none{% endfor %}"
    ),
    "a recursive loop": case(
        "{% for n in tree recursive %}{{ n.v }}({{ loop(n.below) }}){% endfor %}",
        variables={"tree": [{"v": 1, "below": [{"v": 2, "below": []}]}, {"v": 3, "below": []}]},
    ),
    "a namespace": case(
        "{% set ns = namespace(n=0) %}" + each("{% set ns.n = ns.n + m.content | length %}") + "{{ ns.n }}"
    ),
    "a variable set in a loop": case("{% set n = 0 %}" + each("{% set n = n + 1 %}{{ n }}") + "={{ n }}"),
    "a macro": case(
        "{% macro say(m, end='!') %}<{{ m.role }}{{ end }}{% endmacro %}" + each("{{ say(m) }}{{ say(m, end='') }}")
    ),
    "a macro's arguments": case(
        "{% macro f(a) %}{{ varargs | length }}{{ kwargs | length }}{{ f.name }}{% endmacro %}{{ f(1, 2, x=3) }}"
    ),
    "a call block": case(
        "{% macro box(t) %}[{{ t }}{{ caller(1) }}]{% endmacro %}{% call(n) box('x') %}y{{ n }}{% endcall %}"
    ),
    "a set block": case("{% set x %} a{{ messages | length }} {% endset %}[{{ x }}][{{ x | trim }}]"),
    "a filter block": case("{% filter upper | replace('A', 'b') %}a{{ messages[0].role }}{% endfilter %}"),
    "a set block with a filter": case("{% set x | upper %}abc{% endset %}{{ x }}"),
    "a with block": case("{% with a = 1, b = a %}{{ a }}{{ b }}{% endwith %}{{ a is defined }}"),
    "a raw block": case("{% raw %}{{ messages }}{% endraw %}"),
    "an autoescape block": case(
        "{% autoescape true %}{{ messages[1].content }}{% endautoescape %}{{ messages[1].content }}"
    ),
    "whitespace control": case("  {%- for m in messages -%}  {{- m.role -}}  {%- endfor %}  \n x \n"),
    "blocks on lines of their own": case(
        "{% for m in messages %}\n    {% if true %}\n    {{ m.role }}\n    {% endif %}\n{% endfor %}\n\n"
    ),
    "blocks that keep their space": case("a\n  {%+ if true %}x{% endif +%}\nb"),
    "a comment": case("a {# {{ messages }} #} b\n  {# x #}\nc"),
    "a generation block": case(
        each(
            "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        )
    ),
    "a variable set in a generation block": case(
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    ),
    "slices": case("{{ messages[1:] | length }}{{ messages[::-1][0].role }}{{ messages[-1].content[2:5] }}"),
    "string methods": case(
        each("{{ m.content.strip().split(' ') }}{{ m.content.startswith('H') }}{{ m.content.rstrip('\n') }}")
    ),
    "what a sandbox forbids": case("{{ ''.__class__.__mro__ }}"),
    "a change of the messages": case("{{ messages.append(1) }}"),
    "too long a range": case("{% for i in range(999999999) %}{% endfor %}"),
    "an undefined variable": case("[{{ nothing }}{{ nothing is defined }}{{ nothing | default('d') }}]"),
    "an attribute of an undefined variable": case("{{ nothing.more }}"),
    "the tags that are not there": case("{% do messages %}"),
    "a division by zero": case("{{ 1 / 0 }}"),
    "raise_exception": case("{{ raise_exception('roles must alternate: ' ~ messages[0].role) }}"),
    "dates": case("{{ strftime_now('%Y %B') }}"),
    "tests": case(
        each(
            "{{ m.content is string }}{{ m.content is iterable }}{{ m is mapping }}{{ m.content is sequence }}{{ m.name is defined }}"
        )
        + "{{ 3 is odd }}{{ none is none }}{{ 1 is number }}{{ true is boolean }}{{ 'a' in ['a'] }}{{ [] is sameas none }}"
    ),
    "filters": case(
        "{{ messages | map(attribute='role') | join(',') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{{ 'a b' | title }}{{ 'x' | indent(2, true) }}{{ [3, 1] | sort }}{{ {'b': 1, 'a': 2} | dictsort }}{{ '<' | e }}{{ 5 | string }}"
        "{{ {'b': 1} | items | list }}{{ [1, 2, 3] | batch(2) | list }}{{ 'abc' | last }}{{ [1, 1] | unique | list }}"
    ),
    "formatting": case("{{ '%s-%03d' | format('a', 7) }}{{ '%.2f' % 1.5 }}{{ '{:>4}'.format('x') }}"),
    "globals": case(
        "{{ range(3) | list }}{{ dict(a=1) }}{{ joiner is defined }}{{ cycler('a').next() }}{{ lipsum is defined }}"
    ),
    **{
        f"tojson{how}": case(
            "{{ value | tojson" + how + " }}", variables={"value": {"b": "é</", "a": [1, None, True, 1.5]}}
        )
        for how in ("", "(ensure_ascii=True)", "(indent=2)", "(separators=(',', ':'))", "(sort_keys=true)", "(true, 1)")
    },
    "tojson of what is no JSON": case("{{ nothing | tojson }}"),
    "inline conditions": case("{{ 'a' if messages else 'b' }}{{ 'x' if false }}"),
    "an import": case("{% import 'x' as y %}"),
    "an include": case("{% include 'x' %}"),
}

GIVEN: Final = {
    "special tokens": case(
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ sep_token }}|{{ cls_token }}|{{ mask_token }}"
    ),
    "special tokens that are not there": case("{{ image_token is defined }}{{ additional_special_tokens is defined }}"),
    "a variable in place of a special token": case("{{ bos_token }}", variables={"bos_token": "<mine>"}),
    "no tools": case("{{ tools is defined }}{{ tools is none }}{{ tools is not none }}{{ not tools }}"),
    "tools": case(ALL_TOOLS + PLAIN, tools=[ADD, MUL]),
    "tools with an indent": case(
        "{% for t in tools %}{{ t | tojson(indent=4) }}{{ t.function.description }}{% endfor %}", tools=[ADD]
    ),
    "no documents": case("{{ documents is defined }}{{ documents is none }}{% if documents %}x{% endif %}"),
    "documents": case(
        "{% for d in documents %}{{ d.title }}:{{ d.text }};{% endfor %}", documents=[{"title": "t", "text": "x"}]
    ),
    "a switch of the model": case(
        "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}",
        variables={"enable_thinking": False},
    ),
    "a variable that the template does not know": case(PLAIN, variables={"thinking": {"budget": [1]}}),
    "messages as JSON": case("{{ tools }}" + each("{{ m | tojson }}\n"), [*CHAT, *calls('{"a": 1}')]),
    "a name": case(each("{{ m.name }}{{ m | tojson }}"), [{"name": "Ann", "role": "user", "content": "x"}]),
    "no content": case(
        each("[{{ m.content }}{{ m.content is none }}]"), [USER, {"role": "assistant", "content": None}, USER]
    ),
    "no content beside calls": case(
        "{{ tools }}" + each("[{{ m.content }}{{ m.content is none }}]"), calls('{"a": 1}'), tools=[ADD]
    ),
    "empty content": case(each("[{{ m.content }}]"), [{"role": "user", "content": ""}]),
    "the arguments of calls": case(
        ALL_TOOLS
        + each(
            "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{{ c.id }}{% endfor %}"
        ),
        calls('{"b": [1, "é"], "a": null}', "{}", ""),
        tools=[ADD],
    ),
    "arguments that are no object": case(
        ALL_TOOLS + each("{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"),
        calls("[1]", "7", "{broken", "null"),
        tools=[ADD],
    ),
    "the items of arguments": case(
        ALL_TOOLS
        + each(
            "{% for c in m.tool_calls %}{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}{% endfor %}"
        ),
        calls('{"b": 1, "a": "x"}'),
        tools=[ADD],
    ),
    "an empty list of calls": case(
        ALL_TOOLS + each("{{ m.tool_calls is defined }}"),
        [USER, {"role": "assistant", "content": "a", "tool_calls": []}, USER],
    ),
    "the ids of results": case(
        ALL_TOOLS + each("{{ m.tool_call_id }}{{ m | tojson }}"), calls('{"a": 1}'), tools=[ADD]
    ),
    "reasoning": case(
        each("{{ m.reasoning_content }}{{ m.reasoning }}{{ m | tojson }}"),
        [
            USER,
            {"role": "assistant", "content": "a", "reasoning_content": "why"},
            {"role": "assistant", "content": "b", "reasoning": "so"},
        ],
    ),
    "reasoning of a user": case(each("{{ m.reasoning_content is defined }}"), [{**USER, "reasoning_content": "x"}]),
    "a refusal": case(each("{{ m | tojson }}"), [USER, {"role": "assistant", "content": "a", "refusal": None}]),
    "a developer": case(PLAIN, [{"role": "developer", "content": "D"}, USER]),
    "a developer behind the system": case(
        PLAIN, [*CHAT, {"role": "developer", "content": "D"}, {"role": "system", "content": ""}]
    ),
    "a developer whom the template knows": case(
        each("{{ 'dev' if m.role == 'developer' else m.role }}{{ m | tojson }}"),
        [{"role": "developer", "content": "D"}, USER],
    ),
    "a developer of whom the template only tells": case(
        "{# developer #}" + PLAIN, [{"role": "developer", "content": "D"}]
    ),
    "several system messages": case(PLAIN, [CHAT[0], USER, CHAT[0]]),
}

CONTENT: Final = {
    "parts as text": case(PLAIN, PARTS),
    "a loop over parts": case(each("{% for p in m.content %}[{{ p.text }}]{% endfor %};"), PARTS),
    "a loop over filtered parts": case(
        each("{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}[{{ p.text }}]{% endfor %}"), PARTS
    ),
    "either kind of content": case(
        each(
            "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}"
        ),
        PARTS,
    ),
    "a variable named content": case(
        each("{% set content = m.content %}{% for p in content %}[{{ p.text }}]{% endfor %}"), PARTS
    ),
    "a variable with another name": case(
        each("{% set c = m.content %}" + SHOWN + "{% for p in c %}.{% endfor %}"), PARTS
    ),
    "a macro that goes over content": case(
        "{% macro show(c) %}{% for p in c %}[{{ p.text }}]{% endfor %}{% endmacro %}" + each("{{ show(m.content) }}"),
        PARTS,
    ),
    "a macro that gets content by name": case(
        "{% macro show(n, c) %}{% for p in c %}[{{ p.text }}]{% endfor %}{% endmacro %}"
        + each("{{ show(1, c=m['content']) }}"),
        PARTS,
    ),
    "a macro whose parameter is named content": case(
        "{% macro show(content) %}{% for p in content %}{{ p }}.{% endfor %}{% endmacro %}{{ show('ab') }}"
        + each(SHOWN),
        PARTS,
    ),
    "a loop over another variable's content": case(
        each(SHOWN) + "{% for p in other.content %}{{ p }}{% endfor %}", PARTS, variables={"other": {"content": [1]}}
    ),
    "messages under another name": case(
        "{% set all = messages %}{% for x in all %}{% for p in x.content %}[{{ p.text }}]{% endfor %}{% endfor %}",
        PARTS,
    ),
    "messages without the first": case(
        "{% for x in messages[1:] %}{% for p in x.content %}[{{ p.text }}]{% endfor %}{% endfor %}", PARTS
    ),
    "one message by its number": case("{% for p in messages[0].content %}{{ p }}{% endfor %}" + each(SHOWN), PARTS),
    "a slice of the content": case(each("{% for p in m.content[:1] %}[{{ p.text }}]{% endfor %}"), PARTS),
    "messages in a namespace": case(
        "{% set ns = namespace(m=1) %}{% set ns.m = messages %}"
        + each(SHOWN + "{% for p in m.content %}.{% endfor %}"),
        PARTS,
    ),
    "pairs of the content": case(each(SHOWN + "{% for a, b in m.content %}.{% endfor %}"), [USER]),
    "no content in parts": case(
        each("{% for p in m.content %}[{{ p.text }}]{% endfor %};"),
        [USER, {"role": "assistant", "content": None}, {"role": "user", "content": ""}],
    ),
    "the result of a tool in parts": case(
        ALL_TOOLS
        + each(
            "{% if m.role == 'tool' %}{{ m.content }}{% else %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}"
        ),
        [*calls('{"a": 1}')[:2], {"role": "tool", "tool_call_id": "c0", "content": PARTS[0]["content"]}],
        tools=[ADD],
    ),
    "a developer in parts": case(
        each("{{ m.role }}{% for p in m.content %}[{{ p.text }}]{% endfor %}"),
        [USER, {"role": "developer", "content": "D"}],
    ),
}

OPEN: Final = {
    f"{name}, which goes on": {**one, "continue_final_message": True}
    for name, one in {
        "a message": case(PLAIN, [USER, {"role": "assistant", "content": "one two"}]),
        "a message with space at its end": case(PLAIN, [USER, {"role": "assistant", "content": "one "}]),
        "a message that is stripped": case(
            each("<{{ m.role }}>{{ m.content | trim }}</>"), [USER, {"role": "assistant", "content": " one "}]
        ),
        "an empty message": case(PLAIN, [USER, {"role": "assistant", "content": ""}]),
        "a message of space": case(PLAIN, [USER, {"role": "assistant", "content": " "}]),
        "a message that is changed": case(
            each("{{ m.content | upper }}"), [USER, {"role": "assistant", "content": "one"}]
        ),
        "a message that is left out": case(
            "{{ messages[0].content }}", [USER, {"role": "assistant", "content": "one"}]
        ),
        "a message in parts": case(
            each("{% for p in m.content %}[{{ p.text }}]{% endfor %}"),
            [USER, {"role": "assistant", "content": PARTS[0]["content"]}],
        ),
        "words that the template has too": case(
            each("<|im_start|>{{ m.content }}<|im_end|>"), [{"role": "assistant", "content": "im"}]
        ),
        "a template that looks at the generation prompt": case(
            each("{{ m.content }}{{ add_generation_prompt }}"), [USER, {"role": "assistant", "content": "x"}]
        ),
    }.items()
}

NAMES: Final = [{"name": "default", "template": "D" + PLAIN}, {"name": "rag", "template": "R"}]
TOOL_USE: Final = {"name": "tool_use", "template": "T{{ tools | length }}" + PLAIN}
NAMED: Final = {
    "named templates": {"config": [*NAMES, TOOL_USE], "messages": CHAT},
    "named templates and tools": {"config": [*NAMES, TOOL_USE], "messages": CHAT, "tools": [ADD]},
    "named templates without one for tools": {
        "config": [{"name": "default", "template": ALL_TOOLS}],
        "messages": CHAT,
        "tools": [ADD],
    },
    "no default among named templates": {"config": [TOOL_USE], "messages": CHAT, "tools": [ADD]},
    "a template in a file": {"config": "C", "files": {"chat_template.jinja": "F\n" + PLAIN + "\n"}, "messages": CHAT},
    "a file beside named templates": {
        "config": [*NAMES, TOOL_USE],
        "files": {"chat_template.jinja": "F" + ALL_TOOLS},
        "messages": CHAT,
        "tools": [ADD],
    },
    "a folder of templates": {
        "config": "C",
        "files": {"chat_template.jinja": "F" + PLAIN, "additional_chat_templates/tool_use.jinja": "FT" + ALL_TOOLS},
        "messages": CHAT,
        "tools": [ADD],
    },
    "a folder of templates without tools": {
        "config": "C",
        "files": {"chat_template.jinja": "F" + PLAIN, "additional_chat_templates/tool_use.jinja": "FT" + ALL_TOOLS},
        "messages": CHAT,
    },
    "a folder that has the default": {
        "config": "C",
        "files": {"additional_chat_templates/default.jinja": "FD"},
        "messages": CHAT,
    },
}

CHATS: Final[dict[str, Case]] = {**LANGUAGE, **GIVEN, **CONTENT, **OPEN, **NAMED}
