"""The process that follows grammars, with a child for each request: a grammar may keep a compiler busy for ever.

::

    engine ──Begin, socket──▶ this process ──fork──▶ child: compile, accept the tokens so far, first mask
       │                                               │
       ╰◀──────────── mask, or why there is none ──────╯──▶ for each token: accept it, next mask

This process has the model's vocabulary, which takes seconds to prepare, and no other state.  The kernel ends a child
that exceeds its processor time or memory; the engine ends a child whose request has ended.  This module does not import
vLLM.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import xgrammar
from transformers import PreTrainedTokenizerFast

from relay.clients.channel import Channel, ChannelClosed
from thaw_runtime.weights.tokenizer_files import TokenizerFiles, made

FIRST_MASK_S: Final = 5.0
"""Processor time for the first mask: the grammar is compiled, and accepts the tokens of an answer that is continued."""
MASKS_S: Final = 0.5
"""The most processor time that a request's masks may use at a stretch.  Every token gives back EACH_MASK_S of it."""
EACH_MASK_S: Final = 0.01
_MEMORY_BYTES: Final = 1 << 30
"""The memory that a child may map in addition to what this process has mapped."""
_MAX_WHITESPACE: Final = 16
"""Characters of white space between two tokens of JSON.  A small model that may write any number writes them to the end
of its answer."""
_CHARACTERS: Final = (r"[^\"\\\r\n]", r'([^\0-\x1f\"\\] | "\\" [\"\\/bfnrt])')
"""How xgrammar writes a character of such a string, and how it is in JSON."""
_PATTERN: Final = re.compile(r'(Regex\("(?:[^"\\]|\\.)*"), json_string=true\)')
_PLACE: Final = re.compile(r"\[[\d:]+\] \S+\.cc:\d+: ")
"""The prefix of an xgrammar error: the place in xgrammar's source where the error was found."""

TOKEN: Final = struct.Struct("<I")
MASK: Final = b"m"
REFUSED: Final = b"r"
"""The prefix of a refusal: a JSON list of a parameter and its problem follows."""


@dataclass(frozen=True, slots=True)
class Rules:
    """``compiler`` is json, regex, ebnf, lark or tag.  ``params`` name the schemas in a tag, in their order."""

    compiler: str
    text: str
    param: str
    params: tuple[str, ...] = ()


class Refused(Exception):
    def __init__(self, param: str, problem: str) -> None:
        super().__init__(param, problem)


class _ModelTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]  # transformers has no types
    """A tokenizer without the special tokens, because they are not text: inside a string they would vanish from the
    answer."""

    def get_vocab(self) -> dict[str, int]:
        special = {t.content for t in self.backend_tokenizer.get_added_tokens_decoder().values() if t.special}
        return {token: i for token, i in super().get_vocab().items() if token not in special}


def compiler_of(files: TokenizerFiles, vocab_size: int, n_threads: int) -> Any:
    """Raises ModelCorrupt, and what :func:`made` raises for a value of an unexpected type."""
    tokenizer = _ModelTokenizer(tokenizer_object=made(files).tokenizer)
    special = sorted(i for i, t in tokenizer.backend_tokenizer.get_added_tokens_decoder().items() if t.special)
    # any token that is not text will do, because each request names the tokens that end it
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=special[:1] or None)
    return xgrammar.GrammarCompiler(info, max_threads=n_threads, cache_enabled=False)


def compiled(compiler: Any, rules: Rules) -> Any:
    """Return the compiled grammar.  Raises Refused."""
    param = rules.param
    try:
        if rules.compiler == "json":
            return compiler.compile_grammar(_of_schema(rules.text))
        if rules.compiler == "tag":
            tag = json.loads(rules.text)
            for part, named in schemas_of(tag, param, rules.params):  # a tag's own schemas would allow any white space
                param = named
                grammar = _of_schema(json.dumps(part.pop("json_schema")))
                part.pop("style", None)
                part |= {"type": "grammar", "grammar": grammar}
            param = rules.param
            return compiler.compile_structural_tag(json.dumps(tag))
        compile_ = {"regex": compiler.compile_regex, "lark": compiler.compile_lark}.get(rules.compiler)
        return (compile_ or compiler.compile_grammar)(rules.text)
    except (RuntimeError, ValueError, TypeError, MemoryError) as e:  # xgrammar raises these for rules it cannot read
        problem = _PLACE.sub("", str(e)).strip()
        raise Refused(param, f"this is not a grammar that can be followed: {problem:.500}") from e


def _of_schema(schema: str) -> str:
    """The rules of a schema from json_schemas.py, whose patterns are about the text of a string.

    xgrammar takes some patterns for that, too, and holds others to strings without escapes.  In a string of bounded
    length it would write control characters, which JSON has not, and no escapes.
    """
    rules = str(xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=_MAX_WHITESPACE))
    return _PATTERN.sub(r"\1)", rules.replace(*_CHARACTERS))


def schemas_of(tag: Any, param: str, params: tuple[str, ...]) -> list[tuple[dict[str, Any], str]]:
    """The parts of a structural tag that have a JSON Schema, each with the parameter that it came in: ``params`` name
    them in their order, and ``param`` names the others."""
    found: list[dict[str, Any]] = []
    left = [tag]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left.extend(reversed(part))
        elif isinstance(part, dict) and "json_schema" in part and isinstance(part.get("type"), str):
            found.append(part)
        elif isinstance(part, dict):
            left.extend(reversed(part.values()))
    return [(part, params[i] if i < len(params) else param) for i, part in enumerate(found)]


# ── the child of one request ─────────────────────────────────────────────────────────────────────────────────────────


def _follow(compiler: Any, job: Any, vocab_size: int, sock: socket.socket) -> None:
    """Send a mask, and after every token that arrives the next mask, until the engine closes the socket.  Raises
    Refused."""
    rules = Rules(job["compiler"], job["text"], job["param"], tuple(job["params"]))
    signal.setitimer(signal.ITIMER_PROF, FIRST_MASK_S)
    matcher = xgrammar.GrammarMatcher(compiled(compiler, rules), override_stop_tokens=job["stops"])
    if not all(matcher.accept_token(token) for token in job["so_far"]):
        raise Refused(rules.param, "the answer so far does not follow it")
    mask = xgrammar.allocate_token_bitmask(1, vocab_size)
    _send_mask(matcher, mask, rules, sock)
    left_s = MASKS_S
    while token := sock.recv(TOKEN.size):
        signal.setitimer(signal.ITIMER_PROF, left_s)
        if not matcher.accept_token(TOKEN.unpack(token)[0]):
            raise Refused(rules.param, "the answer does not follow it")
        if not matcher.is_terminated():
            _send_mask(matcher, mask, rules, sock)
        left_s = min(MASKS_S, signal.getitimer(signal.ITIMER_PROF)[0] + EACH_MASK_S)


def _send_mask(matcher: Any, mask: Any, rules: Rules, sock: socket.socket) -> None:
    matcher.fill_next_token_bitmask(mask)
    if not mask.any():
        raise Refused(rules.param, "no token can come next, because its rules have no end here")
    sock.send(MASK + mask.numpy().tobytes())


def _child(compiler: Any, job: Any, vocab_size: int, sock: socket.socket) -> NoReturn:
    """``os._exit``: the parent's exit handlers are not this process's."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = _mapped_bytes() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        _follow(compiler, job, vocab_size, sock)
    except Refused as e:
        sock.send(REFUSED + json.dumps(e.args).encode())
    except OSError:
        pass  # the engine has gone
    finally:
        os._exit(0)


def _mapped_bytes() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[0]) * resource.getpagesize()


# ── the process ──────────────────────────────────────────────────────────────────────────────────────────────────────


def serve(channel: Channel) -> None:
    """Fork a child for each request that begins, and kill it when the request ends, until the engine goes."""
    setup, (tokenizer_fd,) = channel.receive()
    with open(tokenizer_fd, "rb") as f:
        f.seek(0)
        files = TokenizerFiles.loaded(f.read(setup["vocabulary_bytes"]), f.read())
    compiler = compiler_of(files, setup["vocab_size"], setup["n_threads"])
    channel.send({"ready": True})
    children: dict[str, int] = {}
    try:
        while True:
            message, fds = channel.receive()
            if "end" in message:
                if (ended := children.pop(message["end"], None)) is not None:  # else it is one of an earlier process
                    _end(ended)
                continue
            sock = socket.socket(fileno=fds[0])
            pid = os.fork()
            if pid == 0:
                channel.sock.close()
                _child(compiler, message, setup["vocab_size"], sock)
            children[message["key"]] = pid
            sock.close()
    except (ChannelClosed, OSError):
        for pid in children.values():
            _end(pid)


def _end(pid: int) -> None:
    """Kill a child.  Children are reaped only here, so the id cannot belong to another process."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def main() -> None:
    serve(Channel(socket.socket(fileno=int(sys.argv[1]))))
    os._exit(0)  # the exit handlers of these libraries take long and free nothing


if __name__ == "__main__":
    main()
